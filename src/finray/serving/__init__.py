"""The serving package: requests and responses of OpenAI's API, and the batch shared by all requests."""
