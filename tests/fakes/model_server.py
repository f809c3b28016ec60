"""A vLLM or SGLang server on the loopback: their paths and shapes, a tiny model's numbers."""

import copy
import json
import threading
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel

from fakes.loopback import LoopbackHandler, LoopbackServer
from stillroom.models.load import LoadedModel

Reply = tuple[int, Any]
IMPOSSIBLE = -9999.0
"""What vLLM writes for the logarithm of nothing."""


class FakeModelServer(LoopbackServer):
    """Serves a tiny model as `served`. `asked` has each request's path and body.

    `before` sees each request first and may answer in its place. `shown` may change an answer.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_model_len: int = 640,
        max_logprobs: int = 20,
        key: str | None = None,
        before: Callable[[str, dict[str, Any]], Reply | None] = lambda _path, _body: None,
        shown: Callable[[str, Any], Any] = lambda _path, answer: answer,
        has_tokenize: bool = True,
        has_lora: bool = True,
    ) -> None:
        self.loaded, self.key = loaded, key
        self.max_model_len, self.max_logprobs = max_model_len, max_logprobs
        self.before, self.shown = before, shown
        self.has_tokenize, self.has_lora = has_tokenize, has_lora
        self.requested: list[tuple[str, dict[str, Any]]] = []
        self.models: dict[str, Any] = {"served": loaded.model}
        self._lock = threading.Lock()
        super().__init__(_Handler)

    def count(self, path: str) -> int:
        return sum(requested == path for requested, _ in self.requested)

    def answer(self, path: str, body: dict[str, Any]) -> Reply:
        # One model, and torch's threads are the test's.
        with self._lock:
            self.requested.append((path, body))
            replied = self.before(path, body)
            if replied is not None:
                return replied
            status, answer = self._route(path, body)
            return status, self.shown(path, answer) if status == 200 else answer

    def _route(self, path: str, body: dict[str, Any]) -> Reply:
        routes: dict[str, Callable[[dict[str, Any]], Reply]] = {
            "/v1/models": self._models,
            "/v1/completions": self._completions,
            "/generate": self._generate,
        }
        if self.has_tokenize:
            routes["/tokenize"] = self._tokenize
        if self.has_lora:
            routes["/v1/load_lora_adapter"] = self._load_adapter
            routes["/v1/unload_lora_adapter"] = self._unload_adapter
        return routes[path](body) if path in routes else (404, {"detail": "Not Found"})

    def _models(self, _body: dict[str, Any]) -> Reply:
        listed = [
            {"id": name, "object": "model", "root": name, "max_model_len": self.max_model_len}
            for name in self.models
        ]
        return 200, {"object": "list", "data": listed}

    def _tokenize(self, body: dict[str, Any]) -> Reply:
        tokenizer: Any = self.loaded.tokenizer
        text = body.get("prompt")
        if text is None:
            text = tokenizer.apply_chat_template(
                body["messages"],
                tools=body.get("tools"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                tokenize=False,
            )
        ids = tokenizer.encode(text, add_special_tokens=body.get("add_special_tokens", False))
        return 200, {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids}

    def _completions(self, body: dict[str, Any]) -> Reply:
        ids, num_asked = body["prompt"], body.get("prompt_logprobs")
        if body["model"] not in self.models:
            return 404, _error(f"The model `{body['model']}` does not exist.")
        if len(ids) + body["max_tokens"] > self.max_model_len:
            return 400, _error(
                f"This model's maximum context length is {self.max_model_len} tokens."
            )
        if (num_asked or 0) > self.max_logprobs:
            return 400, _error(
                f"Requested prompt logprobs of {num_asked}, which is greater than "
                f"max allowed: {self.max_logprobs}"
            )
        new, logprobs, finish = self._sampled(body, ids)
        choice: dict[str, Any] = {
            "index": 0,
            "text": self.loaded.tokenizer.decode(new),
            "finish_reason": finish,
            "stop_reason": None,
            "logprobs": None,
            "prompt_logprobs": None,
        }
        if num_asked is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(body["model"], ids, num_asked)
        if body.get("logprobs") is not None:
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}" for token in new],
                "token_logprobs": logprobs,
                "top_logprobs": None,
                "text_offset": [0] * len(new),
            }
        if body.get("return_token_ids"):
            choice |= {"token_ids": new, "prompt_token_ids": ids}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(new)}
        return 200, {
            "object": "text_completion",
            "model": body["model"],
            "choices": [choice],
            "usage": usage,
        }

    def _prompt_logprobs(self, model: str, ids: list[int], num: int) -> list[Any]:
        logprobs_TV = self.logprobs(model, ids)
        reported: list[Any] = [None]
        for place in range(1, len(ids)):
            row_V = logprobs_TV[place - 1]
            likeliest = row_V.topk(num).indices.tolist() if num else []
            reported.append(
                {
                    str(token): {
                        "logprob": max(row_V[token].item(), IMPOSSIBLE),
                        "rank": int((row_V > row_V[token]).sum()) + 1,
                        "decoded_token": self.loaded.tokenizer.decode([token]),
                    }
                    for token in dict.fromkeys([ids[place], *likeliest])
                }
            )
        return reported

    def _generate(self, body: dict[str, Any]) -> Reply:
        ids, start, num = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
        logprobs_TV = self.logprobs("served", ids)
        own: list[Any] = [[None, ids[start], None]]
        tops: list[Any] = [None]
        for place in range(start + 1, len(ids)):
            row_V = logprobs_TV[place - 1]
            own.append([row_V[ids[place]].item(), ids[place], None])
            top = row_V.topk(num)
            tops.append([[v, t, None] for v, t in zip(*(x.tolist() for x in top), strict=True)])
        meta = {
            "id": "x",
            "prompt_tokens": len(ids),
            "completion_tokens": 0,
            "input_token_logprobs": own,
            "output_token_logprobs": [],
        }
        if num:
            meta |= {"input_top_logprobs": tops, "output_top_logprobs": []}
        return 200, {"text": "", "output_ids": [], "meta_info": meta}

    def _load_adapter(self, body: dict[str, Any]) -> Reply:
        name = body["lora_name"]
        if name in self.models:
            return 400, _error(f"The lora adapter '{name}' has already been loaded.")
        model = PeftModel.from_pretrained(copy.deepcopy(self.loaded.model), body["lora_path"])
        self.models[name] = model.eval()
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _unload_adapter(self, body: dict[str, Any]) -> Reply:
        if self.models.pop(body["lora_name"], None) is None:
            return 404, _error(f"The lora adapter '{body['lora_name']}' cannot be found.")
        return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."

    @torch.no_grad()
    def logprobs(self, model: str, ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self.models[model](torch.tensor([ids])).logits[0].float()
        return logits.log_softmax(-1)

    def _sampled(self, body: dict[str, Any], ids: list[int]) -> tuple[list[int], list[float], str]:
        """Samples as the request says; `ignore_eos` leaves its own stop tokens alone."""
        draws = torch.Generator().manual_seed(body.get("seed") or 0)
        stops = set(body.get("stop_token_ids") or [])
        if not body.get("ignore_eos"):
            stops |= self.loaded.stop_ids
        new: list[int] = []
        reported: list[float] = []
        for _ in range(body["max_tokens"]):
            row_V = self.logprobs(body["model"], [*ids, *new])[-1]
            token = int(torch.multinomial(row_V.exp(), 1, generator=draws))
            new.append(token)
            reported.append(row_V[token].item())
            if token in stops:
                return new, reported, "stop"
        return new, reported, "length"


class _Handler(LoopbackHandler):
    owner: FakeModelServer

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
        self._reply({})

    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        self._reply(self.read_body())

    def _reply(self, body: dict[str, Any]) -> None:
        server = self.owner
        if server.key is not None and self.headers["authorization"] != f"Bearer {server.key}":
            status, answer = 401, {"error": "Unauthorized"}
        else:
            status, answer = server.answer(self.path, body)
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        waits = {"retry_after": "0"} if status >= 500 or status == 429 else {}
        self.send_body(status, data, **waits)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
