"""An ONNX draft alone: the whole sequence as one causal batch over an empty cache, through ONNX Runtime's own calls.

No line of Paceline's session, cache or draft: what a row of a tree is held against.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort


class PlainOnnx:
    def __init__(self, path: Path) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        layout = json.loads(self._session.get_modelmeta().custom_metadata_map["paceline.layout"])
        self._heads, self._groups, self._window = layout["heads"], layout["kv_heads"], layout["window"]
        self._caches = [i for i in self._session.get_inputs() if i.name.startswith(("keys.", "values."))]

    def close(self) -> None:
        del self._session

    def after(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits [len(tokens), rows] after each token of a fresh sequence."""
        n = len(tokens)
        at = np.arange(n, dtype=np.int64)
        causal = np.where(at[:, None] >= at[None], 0, -np.inf).astype(np.float32)
        places = np.stack(np.meshgrid(np.arange(self._groups), at, indexing="ij"), -1).astype(np.int64)
        feed: dict[str, npt.NDArray[np.generic]] = {
            "ids": np.array([tokens], np.int64),
            "positions": at[None],
            "places": places,
            "bias": causal.repeat(self._heads // self._groups, 0),
            "wanted": at,
        }
        if self._window:
            near = np.where(at[:, None] - at[None] < self._window, causal, -np.inf).astype(np.float32)
            feed["near"] = near.repeat(self._heads // self._groups, 0)
        for cache in self._caches:
            feed[cache.name] = np.zeros((cache.shape[0], n, cache.shape[2]), np.float32)
        (logits,) = self._session.run(["logits"], feed)
        return np.asarray(logits)
