"""What importers are made of: plain functions of an import context and values, without opset numbers."""
