"""Front end: the language, tracing, and everything of a call that decides which program runs."""
