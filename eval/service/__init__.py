"""Many requests at once: loops, fitted costs, the page. May import engines/ and below."""
