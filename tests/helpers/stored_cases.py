"""Files with a case and its outcome in each line, in JSON.

Write null as the outcome of a new case, run its test with `--update-golden`, and read what it stored.
"""

import json


def check_cases(path, outcome, config):
    """Compare the outcome of each case of a file with the stored one."""
    stored = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert stored, path
    found = []
    for case, _ in stored:
        try:
            found.append([case, outcome(case)])
        except BaseException as error:
            error.add_note(f"{path.name}: {case}")
            raise
    if config.getoption("--update-golden"):
        path.write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in found), encoding="utf-8")
    else:
        others = [(case, was, now) for (case, was), (_, now) in zip(stored, found, strict=True) if was != now]
        assert not others, f"{path.name}; after a meant change: this test with --update-golden"
