"""What a drafter is: verifier, drafters, their layers, losses, vocabularies and trees."""
