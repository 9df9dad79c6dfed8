"""headstart: train, measure and ship draft models for speculative decoding."""
