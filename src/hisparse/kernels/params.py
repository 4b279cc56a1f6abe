"""The structs of cuda/*.cu in ctypes, field for field. The sources assert that the sizes agree."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

from torch import Tensor

from hisparse.device_pool import Counters, SlotTables


class TablesStruct(ctypes.Structure):
    """`Tables` of common.cuh."""

    _fields_ = [
        *((name, c_void_p) for name in SlotTables._fields),
        ("control", c_void_p),
        ("num_rows", c_int64),
        ("num_slots", c_int64),
    ]


class CountersStruct(ctypes.Structure):
    """`Counters` of common.cuh."""

    _fields_ = [(name, c_void_p) for name in Counters._fields]


class ResolveParams(ctypes.Structure):
    """`Params` of resolve.cu."""

    _fields_ = [
        ("tables", TablesStruct),
        ("counters", CountersStruct),
        ("selection", c_void_p),
        ("request_index", c_void_p),
        ("lengths", c_void_p),
        ("page_table", c_void_p),
        ("host", c_void_p),
        ("pool", c_void_p),
        ("slots", c_void_p),
        ("plan_rows", c_void_p),
        ("plan_slots", c_void_p),
        ("plan_count", c_void_p),
        ("selection_stride", c_int64),
        ("layer", c_int32),
        ("batch", c_int32),
        ("k", c_int32),
        ("max_requests", c_int32),
        ("max_pages", c_int32),
        ("by_recency", c_int32),
        ("begins_step", c_int32),
        ("capacity", c_int32),
        ("copiers", c_int32),
        ("unused", c_int32),
    ]


class InsertParams(ctypes.Structure):
    """`Params` of insert.cu."""

    _fields_ = [
        ("tables", TablesStruct),
        ("counters", CountersStruct),
        ("rows", c_void_p),
        ("slots", c_void_p),
        ("batch", c_int32),
        ("by_recency", c_int32),
    ]


class ReleaseParams(ctypes.Structure):
    """`Params` of release.cu."""

    _fields_ = [("tables", TablesStruct), ("rows", c_void_p), ("num_rows", c_int64)]


class CopyParams(ctypes.Structure):
    """`Params` of copy.cu; each of its kernels reads the fields that it needs."""

    _fields_ = [
        ("tables", TablesStruct),
        ("records", c_void_p),
        ("rows", c_void_p),
        ("slots", c_void_p),
        ("host", c_void_p),
        ("pool", c_void_p),
        ("plan_rows", c_void_p),
        ("plan_slots", c_void_p),
        ("plan_count", c_void_p),
        ("num_records", c_int64),
        ("layer", c_int32),
        ("unused", c_int32),
    ]


class RebuildOrderParams(ctypes.Structure):
    """`Params` of rebuild_order.cu."""

    _fields_ = [
        ("tables", TablesStruct),
        ("counters", CountersStruct),
        ("bins", c_void_p),
        ("heat", c_void_p),
        ("heat_step", c_void_p),
        ("first_layer", c_int32),
        ("policy", c_int32),
    ]


class IndexScoresParams(ctypes.Structure):
    """`Params` of index_scores.cu."""

    _fields_ = [
        ("keys", c_void_p),
        ("page_table", c_void_p),
        ("lengths", c_void_p),
        ("query", c_void_p),
        ("weights", c_void_p),
        ("scores", c_void_p),
        ("max_pages", c_int32),
        ("unused", c_int32),
    ]


class TopKParams(ctypes.Structure):
    """`Params` of top_k.cu."""

    _fields_ = [
        ("scores", c_void_p),
        ("lengths", c_void_p),
        ("positions", c_void_p),
        ("kth", c_void_p),
        ("counts", c_void_p),
        ("marked", c_void_p),
        ("listed", c_void_p),
        ("failures", c_void_p),
        ("score_stride", c_int64),
        ("k", c_int32),
        ("batch", c_int32),
    ]


class AttendLatentParams(ctypes.Structure):
    """`Params` of attend_latent.cu."""

    _fields_ = [
        ("query", c_void_p),
        ("records", c_void_p),
        ("slots", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("scale", c_float),
        ("heads", c_int32),
        ("k", c_int32),
        ("share", c_int32),
    ]


class MergeLatentParams(ctypes.Structure):
    """`Params` of merge_latent.cu."""

    _fields_ = [
        ("shares", c_void_p),
        ("share_lse", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("num_shares", c_int32),
        ("unused", c_int32),
    ]


def tables_struct(tables: SlotTables, control: Tensor) -> TablesStruct:
    """Pointers to all layers' tables."""
    return TablesStruct(
        **_pointers(tables),
        control=control.data_ptr(),
        num_rows=tables.slot_of_row.shape[-1],
        num_slots=tables.row_of_slot.shape[-1],
    )


def counters_struct(counters: Counters) -> CountersStruct:
    """Pointers to all layers' counters."""
    return CountersStruct(**_pointers(counters))


def _pointers(tensors: SlotTables | Counters) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in zip(tensors._fields, tensors, strict=True)}
