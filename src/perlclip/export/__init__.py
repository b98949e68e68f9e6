"""Out of Python: a backbone as an ONNX file that takes adapters as inputs, and adapters as the arrays that it takes."""
