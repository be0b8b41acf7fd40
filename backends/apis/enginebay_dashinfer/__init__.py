"""The DashInfer API: models with a life cycle in one engine, and requests with result queues."""
