"""What is counted: acceptance, replay, speed, quality. May import data, models."""
