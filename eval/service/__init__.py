"""Many requests at once: loops, fitted costs, the page. May import eval/decoding and eval/reports."""
