"""`lm-eval` (lm-evaluation-harness) offline: log-likelihoods and texts of two tasks of our own, alone and in batches, with a
draft and without. What it read is left in lm_eval.json, for `check_lm_eval`."""

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["HF_HOME"] = str(Path("hf").absolute())

import lm_eval
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent / "lm_eval_tasks"
MODEL = Path("home/models/smollm2-135m").absolute()
CAPITALS, SUMS = "redraft_capitals", "redraft_sums"


def evaluated(task, gen_kwargs=None, **more):
    """Its results, and of every request the prompt, what is measured of it, and what lm-eval read from the answer."""
    arguments = {
        "model": "smollm2-135m",
        "base_url": f"{sys.argv[1]}/v1/completions",
        "tokenizer": str(MODEL),
        "tokenizer_backend": "huggingface",
        "max_retries": 1,
        **more,
    }
    # The tasks' files name their data by paths within this folder.
    before = Path.cwd()
    os.chdir(TASKS)
    try:
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args=arguments,
            tasks=[task],
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            gen_kwargs=gen_kwargs,
            bootstrap_iters=0,
            log_samples=True,
        )
    finally:
        os.chdir(before)
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return found["results"][task], samples


def likelihoods(samples):
    return [
        (*arguments, *answer)
        for sample in samples
        for arguments, ((answer, *_),) in zip(
            [list(each) for each in sample["arguments"]], [[each] for each in sample["resps"]], strict=True
        )
    ]


def texts(samples):
    return [sample["resps"][0][0] for sample in samples]


results, samples = evaluated(CAPITALS)
alone = likelihoods(samples)
# More prompts in a request than the server has rows; texts instead of token ids; several requests at a time.
for more in ({"batch_size": 36}, {"tokenized_requests": False}, {"num_concurrent": 4, "batch_size": 3}):
    again, samples = evaluated(CAPITALS, **more)
    assert again["acc,none"] == results["acc,none"], (again, results)
    for one, other in zip(likelihoods(samples), alone, strict=True):
        assert one[:2] == other[:2] and abs(one[2] - other[2]) < 1e-3 and one[3] == other[3], (one, other)

drafted, samples = evaluated(SUMS)
plain, others = evaluated(SUMS, gen_kwargs={"num_draft_tokens": 0, "until": ["\n"], "max_gen_toks": 12})
batched, many = evaluated(SUMS, batch_size=10)
assert texts(samples) == texts(others) == texts(many), (texts(samples), texts(others), texts(many))
assert drafted["exact_match,none"] == plain["exact_match,none"] == batched["exact_match,none"]

Path("lm_eval.json").write_text(json.dumps({"accuracy": results["acc,none"], "likelihoods": alone}))
print("accuracy", results["acc,none"], "exact match", drafted["exact_match,none"])
