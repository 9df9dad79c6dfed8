"""How good a drafter is: lossless decoding, replay, acceptance, speed."""
