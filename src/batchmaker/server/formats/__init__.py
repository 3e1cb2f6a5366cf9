"""What clients send and get, in every protocol: tensors, JSON, sound, text; and what a model declares of them."""
