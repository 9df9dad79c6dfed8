"""What drafters are built from: attention, decoder layers, heads. May import the contracts above it."""
