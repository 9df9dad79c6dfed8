"""Inference engines: serving, their counters, parity with our loop. May import eval/decoding and eval/reports."""
