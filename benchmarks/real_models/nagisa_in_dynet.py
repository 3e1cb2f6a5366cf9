"""nagisa's network as it was written, in DyNet with automatic batching; run where DyNet is installed.

    python -m venv dynet && dynet/bin/pip install dyNET38 "nagisa<0.3" "numpy<2"
    dynet/bin/python benchmarks/real_models/nagisa_in_dynet.py SENTENCES.json OUT.json [--rounds 3] [--strategy 1 2]

From sentence to words, as nagisa.wakati goes, but with the graphs of a mini-batch in one computation, batched by
DyNet's agenda (strategy 1) or by depth (2). A process for each strategy, one thread; seconds are its CPU time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

SIZES = (1, 16, 64, 256)
NAMES = {1: "agenda", 2: "depth"}


def tagger_of(strategy: int) -> tuple[Any, Any]:
    """Return nagisa's tagger and DyNet, started with this way of batching; nagisa would start it without."""
    import dynet_config

    dynet_config.set(mem=2048, random_seed=1, autobatch=strategy)
    import dynet

    dynet_config.set = lambda **_: None
    import nagisa

    return nagisa.tagger, dynet


def segmented(tagger: Any, dynet: Any, sentences: list[str]) -> list[list[str]]:
    """Return the words of each, all graphs computed together."""
    import nagisa_utils as utils

    dynet.renew_cg()
    renew, dynet.renew_cg = dynet.renew_cg, lambda **_: None  # the network renews it for every sentence
    try:
        texts = [utils.preprocess(sentence) for sentence in sentences]
        scores = [tagger._model.encode_ws(known(tagger, utils, text)) for text in texts]
    finally:
        dynet.renew_cg = renew
    dynet.forward([score for each in scores for score in each])
    tags = [utils.np_viterbi(tagger._model.trans_array, [score.npvalue() for score in each]) for each in scores]
    return [utils.segmenter_for_bmes(text, each) for text, each in zip(texts, tags, strict=True)]


def known(tagger: Any, utils: Any, text: str) -> Any:
    """Return what nagisa looks up of a text."""
    return utils.feature_extraction(
        text=text.lower(), uni2id=tagger._uni2id, bi2id=tagger._bi2id, dictionary=tagger._word2id,
        window_size=tagger._hp["WINDOW_SIZE"],
    )  # fmt: skip


def measured(strategy: int, sentences: list[str], rounds: int) -> dict[str, Any]:
    """Return answers, and sentences per CPU second at each size of mini-batch, medians over rounds."""
    tagger, dynet = tagger_of(strategy)
    seen, answers = {}, []
    in_order = sorted(range(len(sentences)), key=lambda number: len(sentences[number]))
    for size in SIZES:
        taken = []
        for _ in range(rounds + 1):  # the first is to warm up
            found: list[Any] = [None] * len(sentences)
            begin_s = time.process_time()
            for at in range(0, len(sentences), size):
                numbers = in_order[at : at + size]
                words = segmented(tagger, dynet, [sentences[number] for number in numbers])
                for number, each in zip(numbers, words, strict=True):
                    found[number] = each
            taken.append(time.process_time() - begin_s)
        seen[f"{NAMES[strategy]}, {size}"] = len(sentences) / median(taken[1:])
        answers = found
    return {"seen": seen, "answers": answers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentences", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strategy", type=int, nargs="+", default=list(NAMES), choices=NAMES)
    options = parser.parse_args()
    if len(options.strategy) == 1:
        sentences = json.loads(options.sentences.read_text("utf-8"))
        result = measured(options.strategy[0], sentences, options.rounds)
    else:
        result = {"seen": {}, "answers": []}
        for strategy in options.strategy:
            part = options.out.with_suffix(f".{strategy}.json")
            command = [sys.executable, __file__, str(options.sentences), str(part), "--rounds", str(options.rounds)]
            environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            subprocess.run([*command, "--strategy", str(strategy)], check=True, env=environment)
            found = json.loads(part.read_text("utf-8"))
            result = {"seen": result["seen"] | found["seen"], "answers": found["answers"]}
    options.out.write_text(json.dumps(result), "utf-8")


if __name__ == "__main__":
    main()
