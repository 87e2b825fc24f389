"""Two curricula of sequence length in a config: by the older and by the newer keys."""

LENGTH = 12  # of whole sequences
LINEAR = {"total_curriculum_step": 4, "difficulty_step": 4}
LEGACY = {
    "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 4, "max_difficulty": LENGTH,
    "schedule_type": "fixed_linear", "schedule_config": LINEAR,
}  # fmt: skip
NEWER = {
    "enabled": True, "seed": 1,
    "data_routing": {"enabled": False, "random_ltd": {"enabled": False, "total_layer_num": 2}},
    "data_sampling": {
        "enabled": True, "num_epochs": 2, "num_workers": 0, "dynamic_batching": {"enabled": False},
        "curriculum_learning": {
            "enabled": True, "data_cluster_path": "/nowhere",
            "curriculum_metrics": {"seqlen_truncate": {
                "difficulty_type": "value", "clustering_type": "single_cluster", "min_difficulty": 4,
                "max_difficulty": LENGTH, "schedule_type": "fixed_linear", "schedule_config": LINEAR,
            }},
        },
    },
}  # fmt: skip
