"""GPU tensors between two processes by NCCL: a communicator for each sender and receiver, made at their first tensor.

    sender                                                receiver
    send: object without its tensors, an offer ─────────▶ recv opens it
          (waits for the receipt)            ◀───── pull ─ asks for the tensors of that offer
    link thread: torch send ═══════ NCCL ════════════════▶ torch receive into new tensors ─▶ receipt

The receiver asks for what it opens when it opens it, so tensors move in the order of the receiver's wishes, whichever
of the sender's threads offered them. Each direction has a communicator of its own: two processes that send to
each other at the same time do not wait for each other. The rendezvous is a TCPStore of the receiver's. A peer's death
aborts its communicators, which ends what waits on them; the next tensor to a relaunched peer makes new ones.

`backend` can be set: NCCL moves CUDA tensors, gloo (CPU tensors) runs the same code where there is no second GPU.
torch enters through here and cuda_ipc.py only, when a tensor is sent.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from rill.errors import PeerDiedError
from rill.runtime.context import WorkerAddress
from rill.runtime.hub.service import name_of
from rill.runtime.process.mailbox import Frames
from rill.runtime.transfer.landing import landing_for_bytes
from rill.runtime.transfer.lanes import Lanes
from rill.runtime.transfer.pending import Pending

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext

PULL = b"pull"
NCCL, GLOO = "nccl", "gloo"
LINK_WAIT_S = 600.0
_SENDER, _RECEIVER = 0, 1

OfferOnWire: TypeAlias = tuple[int, str, list[int]]
"""The number of the object, the backend that will carry it, and the bytes of each tensor."""


class Offer:
    """The tensors of one object, taken out of it; the device hook of `wire.encode`."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self.parts: list[Any] = []

    @property
    def num_exported(self) -> int:
        return len(self.parts)

    def __call__(self, tensor: Any) -> tuple[Any, tuple[Any, ...]] | None:
        if tensor.device.type != self._device_type or tensor.numel() == 0:
            return None
        torch = sys.modules["torch"]
        raw = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        self.parts.append(raw)
        dtype_name = str(tensor.dtype).removeprefix("torch.")
        return _take_part, (len(self.parts) - 1, dtype_name, tuple(tensor.shape))


class DeviceLinks:
    """This process's links. Thread-safe."""

    def __init__(self, context: RuntimeContext, on_refusal: Callable[[str, int, str], None]) -> None:
        """`on_refusal(receiver, number, why)`: an object's tensors cannot be sent, though its receiver asked."""
        self._context = context
        self._on_refusal = on_refusal
        self._me = context.address
        self.backend = NCCL
        self._lock = threading.Lock()
        self._offers: dict[int, list[Any]] = {}
        self._links: dict[tuple[str, int], Any] = {}
        """Process groups of two, by the peer's identity and this process's side."""
        self._stores: dict[str, Any] = {}
        """The rendezvous of each link that this process receives on; it lives as long as the link."""
        self._turns: dict[str, threading.Lock] = {}
        """What comes over a link comes one after the other, in the order it was asked for."""
        self._awaited: dict[str, set[Pending[list[Any]]]] = {}
        """What is on its way here, by the identity of its sender."""
        self._lanes = Lanes("rill-link")
        """What receivers asked for, by receiver: one that is slow, or dead before its link is open, holds up itself."""
        context.mailbox.on(PULL, self._on_pull)
        context.directory.on_death(self.peer_died)

    def can_reach(self, peer: WorkerAddress) -> bool:
        """Whether tensors can go to `peer` this way: both ends have what the backend moves."""
        if self.backend == GLOO:
            return True
        distributed = importlib.import_module("torch.distributed")
        return bool(self._me.gpus and peer.gpus and distributed.is_nccl_available())

    @property
    def device_type(self) -> str:
        """Where the tensors are that a link moves."""
        return "cuda" if self.backend == NCCL else "cpu"

    def new_offer(self) -> Offer:
        return Offer(self.device_type)

    def announce(self, offer: Offer, number: int) -> OfferOnWire:
        """Keep the tensors of the object of that number until they are asked for."""
        torch = sys.modules["torch"]
        for device in {part.device for part in offer.parts if part.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # they are sent from another thread
        with self._lock:
            self._offers[number] = offer.parts
        return number, self.backend, [part.numel() for part in offer.parts]

    def withdraw(self, number: int) -> None:
        """The offer was taken, or nobody waits for it any more."""
        with self._lock:
            self._offers.pop(number, None)

    def pull(self, sender: str, endpoint: str, offer: OfferOnWire) -> list[Any]:
        """Receive what `sender`, whose mailbox is at `endpoint`, offered: bytes on this process's device."""
        pending: Pending[list[Any]] = Pending(f"{self._me.name}: tensors from {sender}", name_of(sender))
        _, backend, sizes = offer
        device = self._context.torch_device if backend == NCCL else "cpu"
        assert device is not None
        landing = landing_for_bytes(sizes, device)
        if landing is None:
            torch = importlib.import_module("torch")
            parts = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        else:
            parts = [landing]
        with self._lock:
            self._awaited.setdefault(sender, set()).add(pending)
        # In a thread, because nothing ends the opening of a link early when the peer dies; this wait it does end.
        args = (sender, endpoint, offer, parts, pending)
        threading.Thread(target=self._receive, args=args, name="rill-link-in", daemon=True).start()
        try:
            return pending.wait(LINK_WAIT_S)
        finally:
            with self._lock:
                self._awaited.get(sender, set()).discard(pending)

    def peer_died(self, identity: str, reason: str) -> None:
        """End what waits for a dead process."""
        with self._lock:
            awaited = list(self._awaited.pop(identity, ()))
        for pending in awaited:
            pending.fail(PeerDiedError(f"{pending.what}: it is gone: {reason}"))
        self._drop(identity)

    def close(self) -> None:
        for identity, _ in list(self._links):
            self._drop(identity)

    def num_links(self) -> int:
        """Communicators that are open."""
        with self._lock:
            return len(self._links)

    # --- the sending side ---------------------------------------------------------------------------------

    def _on_pull(self, frames: Frames) -> None:
        """On the inbox thread, which must not wait for the peer."""
        number, receiver, host, port = pickle.loads(frames[0])
        self._lanes.submit(receiver, lambda: self._serve_pull(number, receiver, host, port))

    def _serve_pull(self, number: int, receiver: str, host: str, port: int) -> None:
        with self._lock:
            parts = self._offers.pop(number, None)
        if parts is None:
            return  # its send has given up; the receiver's wait ends with its deadline
        try:
            distributed = importlib.import_module("torch.distributed")
            store = distributed.TCPStore(host, port, timeout=timedelta(seconds=LINK_WAIT_S))
            link = self._link(receiver, _SENDER, self.backend, store)
            for part in parts:
                link.send([part], _RECEIVER, 0).wait()
        except RuntimeError as error:  # what torch.distributed raises, whatever happened
            self._drop(receiver)
            self._on_refusal(receiver, number, f"no {self.backend} link: {error}")

    # --- the receiving side -------------------------------------------------------------------------------

    def _receive(
        self, sender: str, endpoint: str, offer: OfferOnWire, parts: list[Any], pending: Pending[list[Any]]
    ) -> None:
        torch = importlib.import_module("torch")
        number, backend, _ = offer
        with self._lock:
            turn = self._turns.setdefault(sender, threading.Lock())
        try:
            with turn:
                store = self._store_for(sender)
                order = (number, self._me.identity, self._context.host, store.port)
                self._context.mailbox.post(endpoint, [PULL, pickle.dumps(order)])
                link = self._link(sender, _RECEIVER, backend, store)
                for part in parts:
                    link.recv([part], _SENDER, 0).wait()
                if backend == NCCL:
                    torch.cuda.current_stream(parts[0].device).synchronize()
        except RuntimeError as error:  # what torch.distributed raises, whatever happened
            self._drop(sender)
            pending.fail(PeerDiedError(f"{pending.what} did not come: {error}"))
        else:
            pending.fulfil(lambda: parts)

    # --- links --------------------------------------------------------------------------------------------

    def _store_for(self, sender: str) -> Any:
        distributed = importlib.import_module("torch.distributed")
        with self._lock:
            if sender not in self._stores:
                self._stores[sender] = distributed.TCPStore(
                    self._context.host,
                    0,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=LINK_WAIT_S),
                )
            return self._stores[sender]

    def _link(self, peer: str, side: int, backend: str, store: Any) -> Any:
        with self._lock:
            link = self._links.get((peer, side))
        if link is None:
            link = open_group(backend, store, side)
            with self._lock:
                self._links[peer, side] = link
        return link

    def _drop(self, identity: str) -> None:
        with self._lock:
            links = [self._links.pop((identity, side), None) for side in (_SENDER, _RECEIVER)]
            self._stores.pop(identity, None)
        for link in links:
            if link is not None:
                link.abort()


def open_group(backend: str, store: Any, side: int, *, world_size: int = 2) -> Any:
    """A process group of two, apart from whatever the user's own code does with torch.distributed."""
    distributed = importlib.import_module("torch.distributed")
    timeout = timedelta(seconds=LINK_WAIT_S)
    if backend == GLOO:
        return distributed.ProcessGroupGloo(store, side, world_size, timeout)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, side, world_size, options)


# --- rebuilding -------------------------------------------------------------------------------------------


class _Arrived(threading.local):
    parts: Sequence[Any] = ()


_arrived = _Arrived()


@contextmanager
def arrived(parts: Sequence[Any]) -> Iterator[None]:
    """Let what is decoded inside find its tensors."""
    previous, _arrived.parts = _arrived.parts, parts
    try:
        yield
    finally:
        _arrived.parts = previous


def _take_part(index: int, dtype_name: str, shape: tuple[int, ...]) -> Any:
    torch = importlib.import_module("torch")
    return _arrived.parts[index].view(getattr(torch, dtype_name)).view(shape)
