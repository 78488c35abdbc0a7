"""`LLM`: generation for programs that block, such as scripts and notebooks."""

import os
import sys
import weakref
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, Unpack

from motet.errors import EngineClosedError
from motet.llm.async_llm import AsyncLLM
from motet.llm.background import LoopThread
from motet.llm.outputs import RequestOutput, ScoreOutput
from motet.llm.own_server import START_TIMEOUT_S
from motet.llm.progress_bar import PromptProgress
from motet.llm.prompts import (
    ChatFields,
    CheckedPrompt,
    Conversation,
    Prompt,
    chat_body,
    checked_conversations,
    checked_prompts,
)
from motet.llm.requests import LoRARequests
from motet.llm.sampling_params import SamplingParams

Result = TypeVar("Result")


class LLM:
    """Generates with a server that it starts, or with a running server or gateway, with the names of vLLM's `LLM`.

        llm = LLM("smollm2", max_num_seqs=64)
        for output in llm.generate(["The sea is", "The sky is"], SamplingParams(n=4, temperature=0.6)):
            print(output.prompt, [choice.text for choice in output.outputs])

    See `AsyncLLM` for the arguments and errors. The server is ready when the constructor returns. It ends with `close`,
    with the context (`with LLM(...) as llm`), when the object is garbage-collected, or with this process. An object
    works in any thread, including one that runs an event loop, as in a notebook. In a forked process, it uses the
    server of the process that made it."""

    def __init__(
        self,
        model: str | None = None,
        *,
        url: str | None = None,
        api_key: str | None = None,
        admin_key: str | None = None,
        seed: int | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        **settings: object,
    ) -> None:
        self._core = AsyncLLM(
            model,
            url=url,
            api_key=api_key,
            admin_key=admin_key,
            seed=seed,
            start_timeout_s=start_timeout_s,
            **settings,
        )
        if (own := self._core.own_server) is not None:
            own.start()
            self._core.connect()
        self._pid = os.getpid()
        self._thread = LoopThread()
        self._end = weakref.finalize(self, _end, self._core, self._thread, self._pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be sent to another process: make LLM(url=...) with the same URL there")

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return self._core.url

    @property
    def api_key(self) -> str | None:
        """Key of the server, for its other routes, such as `GET /metrics`. None if it needs none."""
        return self._core.api_key

    @property
    def admin_key(self) -> str | None:
        """Key of the server for the routes of operators and trainers, as for `motet.weights.push`. None if there is
        none, or if it was not given to `LLM(url=...)`."""
        return self._core.admin_key

    def close(self) -> None:
        """Ends all answers in progress, and the server that was started. In a forked process, the server stays."""
        self._end()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        adapter: str | None = None,
        lora_request: LoRARequests = None,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Returns the answers to one or several prompts, in the order of the prompts: see `AsyncLLM.generate`.

        `use_tqdm`: False for no progress bar, which is shown on terminals only.

        Ctrl-C ends the prompts that are not done. The result then has their outputs with `finished` False and without
        choices. If none is done, or on a second Ctrl-C, KeyboardInterrupt is raised."""
        return self._run(
            checked_prompts(prompts),
            sampling_params,
            use_tqdm=use_tqdm,
            adapter=adapter,
            lora_request=lora_request,
            priority=priority,
        )

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        adapter: str | None = None,
        lora_request: LoRARequests = None,
        priority: int = 0,
        **chat: Unpack[ChatFields],
    ) -> list[RequestOutput]:
        """Returns the answers to one or several conversations: see `AsyncLLM.chat` and `generate`."""
        return self._run(
            checked_conversations(messages),
            sampling_params,
            use_tqdm=use_tqdm,
            adapter=adapter,
            lora_request=lora_request,
            priority=priority,
            chat=chat_body(chat),
        )

    def score(
        self,
        prompt: Prompt | Conversation,
        continuations: Sequence[str | Sequence[int]],
        *,
        adapter: str | None = None,
        **chat: Unpack[ChatFields],
    ) -> ScoreOutput:
        """Returns the log-probabilities of continuations of one prompt: see `AsyncLLM.score`."""
        return self._wait(self._core.score(prompt, continuations, adapter=adapter, **chat))

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that apply if none are given: see `AsyncLLM.get_default_sampling_params`."""
        return self._wait(self._core.get_default_sampling_params())

    def get_tokenizer(self) -> Any:
        """Returns transformers' tokenizer of the model: see `AsyncLLM.get_tokenizer`."""
        return self._wait(self._core.get_tokenizer())

    def _run(
        self,
        prompts: Sequence[CheckedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
        adapter: str | None,
        lora_request: LoRARequests,
        priority: int,
        chat: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        shows = use_tqdm and sys.stderr is not None and sys.stderr.isatty()
        with PromptProgress(len(prompts)) if shows else nullcontext() as progress:
            on_done = None if progress is None else progress.add
            run = self._wait(
                self._core.run(
                    prompts,
                    sampling_params,
                    adapter=adapter,
                    lora_request=lora_request,
                    priority=priority,
                    on_done=on_done,
                    chat=chat,
                )
            )
            running = self._start(run.finish())
            try:
                results = running.result()
            except KeyboardInterrupt:
                self._thread.call(run.stop)
                results = running.result()
                if not any(results):
                    raise
        return [
            _unfinished(prompt) if result is None else self._with_wait(result)
            for prompt, result in zip(prompts, results, strict=True)
        ]

    def _with_wait(self, output: RequestOutput) -> RequestOutput:
        """Returns the output with a handle that waits in this thread."""
        if output.kept is None:
            return output
        return replace(output, kept=replace(output.kept, wait=self._wait_for))

    def _wait_for(self, output: Awaitable[RequestOutput]) -> RequestOutput:
        async def result() -> RequestOutput:
            return await output

        return self._wait(result())

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        running = self._start(work)
        try:
            return running.result()
        except CancelledError as error:
            raise EngineClosedError("the LLM was closed") from error
        except KeyboardInterrupt:
            running.cancel()
            raise

    def _start(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Starts work in the thread with the event loop: in a new thread in a forked process, which has no threads."""
        if not self._end.alive:
            work.close()
            raise EngineClosedError("the LLM is closed")
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._thread = LoopThread()
            self._end.detach()
            self._end = weakref.finalize(self, _end, self._core, self._thread, self._pid)
        return self._thread.start(work)


def _end(core: AsyncLLM, thread: LoopThread, pid: int) -> None:  # sizes: called by weakref
    """Ends the thread and the server of an LLM."""
    if os.getpid() == pid:
        thread.close(core.disconnect)
    if core.own_server is not None:
        core.own_server.close()


def _unfinished(prompt: CheckedPrompt) -> RequestOutput:
    ids = None if prompt.token_ids is None else [*prompt.token_ids]
    return RequestOutput(request_id="", prompt=prompt.text, prompt_token_ids=ids, outputs=[], finished=False)
