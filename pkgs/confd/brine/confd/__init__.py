"""The configuration daemon and its client: ask any master candidate, get a signed answer."""
