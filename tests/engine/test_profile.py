"""A profile of a run names what ran and says how long the device was idle."""

from __future__ import annotations

import pytest
from tiny_models import write_model

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.profile import profile


def test_a_run_is_traced(tmp_path):
    folder = write_model(tmp_path / "model", seed=2)
    with LLM(str(folder), num_blocks=20, block_size=16, max_model_len=128, compile_cache=None) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        llm.generate([[1, 2, 3]], params)
        with profile(tmp_path / "trace") as trace:
            llm.generate([[1, 2, 3]], params)
    assert trace.trace.num_kernels > 0
    assert 0.0 <= trace.trace.idle_share < 1.0
    assert trace.trace.kernels[0].seconds > 0
    assert "idle" in trace.describe()
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write a profile to"), profile(tmp_path / "file" / "below"):
        pass
