"""The model drafted for: states, logits, caches, adapters. Imports no other room."""
