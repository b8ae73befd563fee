"""Kernels and operators are sorted by their names, as profilers report them."""

import pytest

from lmkit.measure.trace import CLASSES, DeviceWork, Trace, class_times, kernel_class

NAMES = {
    "matrix products": (
        "nvjet_tst_192x192_64x4_2x1_v_bz_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams<float>)",
        *("cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_nt_align8", "aten::mm"),
    ),
    "attention forward": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0",
        *("forward_kernel", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    ),
    "attention backward": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_31_64x64x64_4x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 256, 64>(Params)",
        *("dkdv_kernel", "prepare_kernel", "aten::_scaled_dot_product_flash_attention_for_cpu_backward"),
    ),
    "SwiGLU, GELU": ("swiglu_gradient_kernel", "triton_poi_fused_mul_silu_4", "aten::gelu"),
    "norm": ("add_norm_kernel", "aten::native_layer_norm", "aten::linalg_vector_norm"),
    "cross-entropy": (
        *("cross_entropy_kernel", "triton_red_fused__log_softmax__to_copy_view_1", "aten::gather"),
    ),
    "clipping, optimizer": ("adamw_kernel", "decide_kernel", "aten::_foreach_norm", "aten::_fused_adamw_"),
    "casts to fp8": ("cast_rows_kernel", "cast_transposed_kernel"),
    "RoPE": ("rope_kernel", "aten::view_as_complex"),
    "embedding": (
        *("vectorized_gather_kernel", "scatter_add_kernel", "sorted_sum_kernel", "aten::index_select"),
    ),
    "rest": ("memcpy", "triton_poi_fused_add_0", "aten::copy_", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
}


def test_every_class_has_an_example():
    assert tuple(NAMES) == CLASSES


@pytest.mark.parametrize(("wanted", "names"), NAMES.items())
def test_names_are_sorted(wanted, names):
    assert {name: kernel_class(name) for name in names} == dict.fromkeys(names, wanted)


def test_times_of_a_class_are_added_and_divided_by_the_steps():
    work = [
        DeviceWork("kernel", name, start, start + 3_000_000, 1, 0, start)
        for start, name in enumerate(("aten::mm", "gemm", "adamw_kernel", "memcpy"))
    ]
    # Operators do not count where there is a GPU.
    times = class_times(Trace("kineto", "t", (), (), work, ops={"aten::mm": (1, 10**9)}), steps=2)
    found = {name: ms for name, ms in times.items() if ms}
    assert found == {"matrix products": 3.0, "clipping, optimizer": 1.5, "rest": 1.5}
    assert tuple(times) == CLASSES


def test_without_a_gpu_operators_count():
    times = class_times(Trace("kineto", "t", (), None, None, ops={"aten::mm": (4, 8_000_000)}), steps=4)
    assert times == dict.fromkeys(CLASSES, 0.0) | {"matrix products": 2.0}
