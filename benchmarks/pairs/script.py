"""The job done without Stillroom: what a capable agent writes with PyTorch, transformers and httpx.

    script.py FOLDER/job --base-url URL --budget-usd 0.40 --minutes 40

Labels the inputs, asks again about labels that a cross-fitted classifier doubts, spends what is
left on rewordings, trains all weights but the embeddings, and evaluates on labelled.csv. Leaves
FOLDER/job/model and prints a JSON line.
"""

import argparse
import csv
import json
import os
import random
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")

import httpx
import torch
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModelForCausalLM, AutoTokenizer

LABEL_TOKENS, REWORDED_TOKENS, AT_ONCE, TRAINED_BY = 16, 80, 8, 0.9
RATE, BATCH, MAX_EPOCHS, WARMUP_STEPS = 2e-4, 8, 4, 20
REWORD = "Reword the message as another person would write it. Answer with the new message only."


class Teacher:
    """The endpoint, which is never asked for more than the budget allows."""

    def __init__(self, http, model, prices, budget_usd):
        self._http, self._lock = http, threading.Lock()
        self._model, self._budget, self.spent = model, budget_usd, 0.0
        self._input = prices["input_usd_per_million"] / 1e6
        self._output = prices["output_usd_per_million"] / 1e6

    def ask(self, system, text, max_tokens, temperature=0.0):
        """Returns the answer, or None if the budget is spent or the endpoint keeps failing."""
        most = (10 + (len(system) + len(text)) / 3) * self._input + max_tokens * self._output
        with self._lock:
            if self.spent + most > self._budget:
                return None
            self.spent += most
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        limits = {"max_tokens": max_tokens, "temperature": temperature}
        body = {"model": self._model, "messages": messages, **limits}
        for attempt in range(8):
            try:
                reply = self._http.post("chat/completions", json=body)
            except httpx.TransportError:
                # What was billed for it is unknown, so all of it stays counted.
                return None
            if reply.status_code == 200:
                break
            if reply.status_code != 429 and reply.status_code < 500:
                raise SystemExit(f"{reply.status_code}: {reply.text}")
            time.sleep(float(reply.headers.get("Retry-After", 0.5 * 2**attempt)))
        said = reply.json() if reply.status_code == 200 else {}
        used = Counter(said.get("usage", {}))
        cost = used["prompt_tokens"] * self._input + used["completion_tokens"] * self._output
        with self._lock:
            self.spent += cost - most
        return said["choices"][0]["message"]["content"] if said else None

    def ask_all(self, system, texts, max_tokens, temperature=0.0):
        """Returns the answers to texts, None where there is none."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            asks = [pool.submit(self.ask, system, t, max_tokens, temperature) for t in texts]
            return [ask.result() for ask in asks]


def read_csv(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def label_in(answer, labels):
    """Returns the label that an answer names first, or None."""
    match = re.search(rf"\b({'|'.join(map(re.escape, labels))})\b", (answer or "").lower())
    return match and match[1]


def features(texts):
    """Returns normalised TF-IDF of words and pairs of words, [texts, terms]."""
    terms = []
    for text in texts:
        words = re.findall(r"\w+", re.sub(r"\d+", "0", text.lower()))
        terms.append(Counter([*words, *map(" ".join, pairwise(words))]))
    num_texts = Counter(term for counts in terms for term in counts)
    places = {term: place for place, term in enumerate(t for t, n in num_texts.items() if n > 1)}
    matrix = torch.zeros(len(texts), len(places))
    for row, counts in enumerate(terms):
        matrix[row, [places[term] for term in counts if term in places]] = 1
    return normalize(matrix * torch.tensor([len(texts) / num_texts[term] for term in places]).log())


def cross_fitted(matrix, targets, trusted, num_labels, folds=5):
    """Returns for each row the label that a classifier fitted on other, trusted rows gives it."""
    fold_of = torch.arange(len(targets)) % folds
    guesses = torch.zeros_like(targets)
    for fold in range(folds):
        chosen = (fold_of != fold) & trusted
        weights = torch.zeros(matrix.shape[1], num_labels, requires_grad=True)
        optimizer = torch.optim.Adam([weights], lr=0.1, weight_decay=2e-4)
        for _ in range(150):
            loss = cross_entropy(matrix[chosen] @ weights, targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        guesses[fold_of == fold] = (matrix[fold_of == fold] @ weights).argmax(1).detach()
    return guesses


def clean_rows(teacher, system, rows, labels):
    """Returns the rows without those whose label is in doubt, or with the label that won."""
    targets = torch.tensor([labels.index(label) for _, label in rows])
    matrix = features([text for text, _ in rows])
    trusted = torch.ones(len(rows), dtype=torch.bool)
    for _ in range(2):
        guesses = cross_fitted(matrix, targets, trusted, len(labels))
        trusted = guesses == targets
    doubtful = [row for row in range(len(rows)) if not trusted[row]]
    texts = [rows[row][0] for row in doubtful for _ in range(2)]
    answers = teacher.ask_all(system, texts, LABEL_TOKENS, temperature=0.7)
    kept = [row for row, is_trusted in zip(rows, trusted.tolist(), strict=True) if is_trusted]
    for number, row in enumerate(doubtful):
        again = [label_in(answer, labels) for answer in answers[2 * number : 2 * number + 2]]
        guess = labels[int(guesses[row])]
        if [rows[row][1], *again].count(guess) >= 2:
            kept.append((rows[row][0], guess))
    return kept, len(doubtful)


def prompt(tokenizer, system, text):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def train(model, tokenizer, system, rows, deadline):
    """Trains on batches of similar lengths until the epochs or the time end; returns the epochs."""
    encoded = []
    for text, label in rows:
        start = tokenizer(prompt(tokenizer, system, text), add_special_tokens=False)["input_ids"]
        answer = tokenizer(label, add_special_tokens=False)["input_ids"]
        encoded.append((start, [*answer, tokenizer.eos_token_id]))
    # The output head shares them; a step without their gradients is faster.
    model.get_input_embeddings().weight.requires_grad_(False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE)
    begun, step, per_epoch = time.monotonic(), 0, -(-len(rows) // BATCH)
    model.train()
    while True:
        encoded.sort(key=lambda row: len(row[0]) + random.gauss(0, 8))
        batches = [encoded[i : i + BATCH] for i in range(0, len(encoded), BATCH)]
        random.shuffle(batches)
        for batch in batches:
            spent = (time.monotonic() - begun) / max(1e-9, deadline - begun)
            progress = max(step / (MAX_EPOCHS * per_epoch), spent)
            if progress >= 1:
                return round(step / per_epoch, 2)
            warmup = min(1, (step + 1) / WARMUP_STEPS)
            optimizer.param_groups[0]["lr"] = RATE * warmup * (1 - progress)
            width = max(len(start) + len(answer) for start, answer in batch)
            ids = torch.full((len(batch), width), tokenizer.eos_token_id)
            targets = torch.full((len(batch), width), -100)
            for row, (start, answer) in enumerate(batch):
                end = len(start) + len(answer)
                ids[row, :end] = torch.tensor(start + answer)
                # The hidden state before a token predicts it.
                targets[row, len(start) - 1 : end - 1] = torch.tensor(answer)
            # Padding is on the right, where no token of the row sees it.
            hidden = model.model(input_ids=ids).last_hidden_state[targets >= 0]
            loss = cross_entropy(model.lm_head(hidden).float(), targets[targets >= 0])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            step += 1


@torch.inference_mode()
def accuracy(model, tokenizer, system, rows):
    """Returns the share of rows whose greedy answer is the label."""
    model.eval()
    tokenizer.padding_side, right = "left", 0
    for start in range(0, len(rows), 16):
        batch = rows[start : start + 16]
        prompts = [prompt(tokenizer, system, text) for text, _ in batch]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        new = output[:, inputs["input_ids"].shape[1] :]
        answers = tokenizer.batch_decode(new, skip_special_tokens=True)
        right += sum(a.strip() == label for a, (_, label) in zip(answers, batch, strict=True))
    return right / len(rows)


def deliver(job, facts, rows, deadline):
    """Trains, saves and evaluates a student; returns its epochs and its accuracy."""
    system = f"{facts['task']} Answer with one of: {', '.join(facts['labels'])}."
    tokenizer = AutoTokenizer.from_pretrained(facts["student"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(facts["student"], dtype=torch.float32)
    epochs = train(model, tokenizer, system, rows, deadline)
    output = {"path": str(job.resolve() / "model"), "system": system}
    model.save_pretrained(output["path"])
    tokenizer.save_pretrained(output["path"])
    (job / "model.json").write_text(json.dumps(output), encoding="utf-8")
    test = [(row["text"], row["label"]) for row in read_csv(job / "labelled.csv")]
    return {"epochs": epochs, "accuracy": accuracy(model, tokenizer, system, test)}


def main():
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--budget-usd", type=float, default=0.40)
    parser.add_argument("--minutes", type=float, default=40)
    options = parser.parse_args()
    random.seed(0)
    job, facts = options.job, json.loads((options.job / "job.json").read_text(encoding="utf-8"))
    labels = facts["labels"]
    texts = [row["text"] for row in read_csv(job / "inputs.csv")]
    headers = {"Authorization": f"Bearer {os.environ.get('TEACHER_API_KEY', 'none')}"}
    http = httpx.Client(base_url=options.base_url, headers=headers, timeout=60)
    teacher = Teacher(http, facts["teacher"], facts["prices"], options.budget_usd)
    answers = teacher.ask_all(facts["system"], texts, LABEL_TOKENS)
    answered = zip(texts, answers, strict=True)
    labelled = [(text, label) for text, answer in answered if (label := label_in(answer, labels))]
    kept, num_doubtful = clean_rows(teacher, facts["system"], labelled, labels)
    new = teacher.ask_all(REWORD, [text for text, _ in kept], REWORDED_TOKENS, temperature=1.0)
    reworded = [(text, label) for text, (_, label) in zip(new, kept, strict=True) if text]
    trained = deliver(job, facts, kept + reworded, begun + TRAINED_BY * 60 * options.minutes)
    report = {
        "labelled": len(labelled), "doubtful": num_doubtful, "kept": len(kept),
        "reworded": len(reworded), "spent_usd": round(teacher.spent, 4), **trained,
        "minutes": round((time.monotonic() - begun) / 60, 1),
    }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
