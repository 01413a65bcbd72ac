"""Analysis of a model of transformers by passes that store nothing in pages: calibration, sensitivities, fake-quantized evaluation."""
