"""The structs of cuda/*.cu in ctypes, field for field. The sources assert that the sizes agree."""

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from typing import Any

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
        *(
            (name, c_void_p)
            for name in "selection request_index page_table host pool slots plan_rows plan_slots plan_count".split()
        ),
        ("selection_stride", c_int64),
        *(
            (name, c_int32)
            for name in ("layer batch k max_requests max_pages by_recency begins_step capacity copiers unused".split())
        ),
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
        *((name, c_void_p) for name in "records rows slots host pool plan_rows plan_slots plan_count".split()),
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
        ("first_layer", c_int32),
        ("policy", c_int32),
    ]


def tables_struct(tables: SlotTables, control: Tensor) -> TablesStruct:
    """Pointers to all layers' tables."""
    struct = _pointers(TablesStruct, tables)
    struct.control = control.data_ptr()
    struct.num_rows = tables.slot_of_row.shape[-1]
    struct.num_slots = tables.row_of_slot.shape[-1]
    return struct


def counters_struct(counters: Counters) -> CountersStruct:
    """Pointers to all layers' counters."""
    return _pointers(CountersStruct, counters)


def _pointers(struct: type[Any], tensors: Any) -> Any:
    return struct(**{name: tensor.data_ptr() for name, tensor in zip(tensors._fields, tensors, strict=True)})
