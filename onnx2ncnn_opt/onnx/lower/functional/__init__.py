"""The building blocks of importers: plain functions of an import context and values, without opset numbers."""
