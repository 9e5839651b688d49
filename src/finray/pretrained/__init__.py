"""What a model directory or a Hub id holds: tokenizer, headers of weights, bundled configs. No torch."""
