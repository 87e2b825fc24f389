"""What a model answers: predictions and text, under the training layout."""
