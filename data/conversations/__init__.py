"""Reading and mixing conversations. May import models."""
