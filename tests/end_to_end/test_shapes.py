"""Random weights with real ranks: a config alone is enough, and any rank count answers alike."""

from __future__ import annotations

import json
from pathlib import Path

from tests.end_to_end.command import json_lines, run
from tests.launcher.fakes import CONFIG


def test_a_bare_config_answers_on_one_and_three_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "attention_bias": True}))
    arguments = ("generate", str(tmp_path), "--load-format", "random", "--ignore-eos", "--json")
    options = ("--prompt-ids", "5,6,7", "--prompt-ids", "8", "--max-tokens", "12")
    overlay = ("--overlay", "bias=random,norm=random")
    alone, cut = (
        [line["token_ids"] for line in json_lines(run(*arguments, *options, *overlay, *tp)[0])]
        for tp in ((), ("--tp", "3"))
    )
    assert alone == cut
    assert [len(each) for each in alone] == [12, 12]
    assert all(len({*each}) > 4 for each in alone)
