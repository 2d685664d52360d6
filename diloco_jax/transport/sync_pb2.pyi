from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Chunk(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ControlRequest(_message.Message):
    __slots__ = ("check", "transfer_id", "join", "confirm", "progress", "contribution", "decline", "adopted", "heartbeat", "leave", "donation", "no_donation", "recovered")
    CHECK_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    DONATION_FIELD_NUMBER: _ClassVar[int]
    NO_DONATION_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_FIELD_NUMBER: _ClassVar[int]
    check: int
    transfer_id: int
    join: Join
    confirm: Confirm
    progress: Progress
    contribution: Contribution
    decline: Decline
    adopted: Adopted
    heartbeat: Heartbeat
    leave: Leave
    donation: Donation
    no_donation: NoDonation
    recovered: Recovered
    def __init__(self, check: _Optional[int] = ..., transfer_id: _Optional[int] = ..., join: _Optional[_Union[Join, _Mapping]] = ..., confirm: _Optional[_Union[Confirm, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., contribution: _Optional[_Union[Contribution, _Mapping]] = ..., decline: _Optional[_Union[Decline, _Mapping]] = ..., adopted: _Optional[_Union[Adopted, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., donation: _Optional[_Union[Donation, _Mapping]] = ..., no_donation: _Optional[_Union[NoDonation, _Mapping]] = ..., recovered: _Optional[_Union[Recovered, _Mapping]] = ...) -> None: ...

class ControlResponse(_message.Message):
    __slots__ = ("check", "transfer_id", "offer", "refused", "joined", "pull", "publish", "settled", "finish", "heartbeat", "donate", "donation", "no_donation")
    CHECK_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DONATE_FIELD_NUMBER: _ClassVar[int]
    DONATION_FIELD_NUMBER: _ClassVar[int]
    NO_DONATION_FIELD_NUMBER: _ClassVar[int]
    check: int
    transfer_id: int
    offer: Offer
    refused: Refused
    joined: Joined
    pull: Pull
    publish: Publish
    settled: Settled
    finish: Finish
    heartbeat: Heartbeat
    donate: Donate
    donation: Donation
    no_donation: NoDonation
    def __init__(self, check: _Optional[int] = ..., transfer_id: _Optional[int] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., joined: _Optional[_Union[Joined, _Mapping]] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ..., publish: _Optional[_Union[Publish, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., donate: _Optional[_Union[Donate, _Mapping]] = ..., donation: _Optional[_Union[Donation, _Mapping]] = ..., no_donation: _Optional[_Union[NoDonation, _Mapping]] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("size_bytes", "crc32")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    crc32: int
    def __init__(self, size_bytes: _Optional[int] = ..., crc32: _Optional[int] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("version", "digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    digest: int
    def __init__(self, version: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("protocol", "learner", "nonce", "agreement", "host", "pid", "run", "incarnation")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    learner: str
    nonce: int
    agreement: str
    host: str
    pid: int
    run: str
    incarnation: int
    def __init__(self, protocol: _Optional[int] = ..., learner: _Optional[str] = ..., nonce: _Optional[int] = ..., agreement: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., run: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Confirm(_message.Message):
    __slots__ = ("nonce", "incarnation", "clock", "steps", "tokens", "held", "shard", "cursor")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    incarnation: int
    clock: int
    steps: int
    tokens: int
    held: _containers.RepeatedCompositeFieldContainer[Held]
    shard: int
    cursor: int
    def __init__(self, nonce: _Optional[int] = ..., incarnation: _Optional[int] = ..., clock: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., shard: _Optional[int] = ..., cursor: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("clock", "steps", "tokens", "step_ns", "finished")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    clock: int
    steps: int
    tokens: int
    step_ns: int
    finished: bool
    def __init__(self, clock: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., step_ns: _Optional[int] = ..., finished: bool = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("sync", "fragment", "version", "steps", "tokens_from", "tokens_to", "shard", "cursor", "payload")
    SYNC_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FROM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TO_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    sync: int
    fragment: int
    version: int
    steps: int
    tokens_from: int
    tokens_to: int
    shard: int
    cursor: int
    payload: Payload
    def __init__(self, sync: _Optional[int] = ..., fragment: _Optional[int] = ..., version: _Optional[int] = ..., steps: _Optional[int] = ..., tokens_from: _Optional[int] = ..., tokens_to: _Optional[int] = ..., shard: _Optional[int] = ..., cursor: _Optional[int] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ...) -> None: ...

class Decline(_message.Message):
    __slots__ = ("sync", "fragment", "reason", "tokens_to")
    SYNC_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TO_FIELD_NUMBER: _ClassVar[int]
    sync: int
    fragment: int
    reason: str
    tokens_to: int
    def __init__(self, sync: _Optional[int] = ..., fragment: _Optional[int] = ..., reason: _Optional[str] = ..., tokens_to: _Optional[int] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("fragment", "version", "tokens", "matched", "reason")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    tokens: int
    matched: bool
    reason: str
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., tokens: _Optional[int] = ..., matched: bool = ..., reason: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Donation(_message.Message):
    __slots__ = ("transfer", "donor", "clock", "versions", "digest", "payload")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    DONOR_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    donor: str
    clock: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    digest: int
    payload: Payload
    def __init__(self, transfer: _Optional[int] = ..., donor: _Optional[str] = ..., clock: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ..., digest: _Optional[int] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ...) -> None: ...

class NoDonation(_message.Message):
    __slots__ = ("transfer", "reason")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    reason: str
    def __init__(self, transfer: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Recovered(_message.Message):
    __slots__ = ("transfer", "way")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    way: str
    def __init__(self, transfer: _Optional[int] = ..., way: _Optional[str] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("incarnation", "run")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    run: str
    def __init__(self, incarnation: _Optional[int] = ..., run: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "text", "retry_ns")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RETRY_NS_FIELD_NUMBER: _ClassVar[int]
    code: str
    text: str
    retry_ns: int
    def __init__(self, code: _Optional[str] = ..., text: _Optional[str] = ..., retry_ns: _Optional[int] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("incarnation", "clock", "shard", "cursor", "due", "settled", "donation")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    DUE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    DONATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    clock: int
    shard: int
    cursor: int
    due: _containers.RepeatedScalarFieldContainer[int]
    settled: _containers.RepeatedScalarFieldContainer[int]
    donation: int
    def __init__(self, incarnation: _Optional[int] = ..., clock: _Optional[int] = ..., shard: _Optional[int] = ..., cursor: _Optional[int] = ..., due: _Optional[_Iterable[int]] = ..., settled: _Optional[_Iterable[int]] = ..., donation: _Optional[int] = ...) -> None: ...

class Donate(_message.Message):
    __slots__ = ("transfer", "clock", "versions")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    clock: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, transfer: _Optional[int] = ..., clock: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("sync", "fragment", "now")
    SYNC_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    sync: int
    fragment: int
    now: bool
    def __init__(self, sync: _Optional[int] = ..., fragment: _Optional[int] = ..., now: bool = ...) -> None: ...

class Publish(_message.Message):
    __slots__ = ("sync", "fragment", "version", "base_version", "digest", "settled_to", "keep", "payload")
    SYNC_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SETTLED_TO_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    sync: int
    fragment: int
    version: int
    base_version: int
    digest: int
    settled_to: int
    keep: bool
    payload: Payload
    def __init__(self, sync: _Optional[int] = ..., fragment: _Optional[int] = ..., version: _Optional[int] = ..., base_version: _Optional[int] = ..., digest: _Optional[int] = ..., settled_to: _Optional[int] = ..., keep: bool = ..., payload: _Optional[_Union[Payload, _Mapping]] = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ("sync", "fragment", "merged", "reason")
    SYNC_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    sync: int
    fragment: int
    merged: bool
    reason: str
    def __init__(self, sync: _Optional[int] = ..., fragment: _Optional[int] = ..., merged: bool = ..., reason: _Optional[str] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
