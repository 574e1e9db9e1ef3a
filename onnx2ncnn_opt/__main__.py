"""``python -m onnx2ncnn_opt``."""

import sys

from onnx2ncnn_opt.cli.main import main

sys.exit(main())
