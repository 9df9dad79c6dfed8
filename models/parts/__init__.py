"""What drafters are built from. May import the contracts and what is below them."""
