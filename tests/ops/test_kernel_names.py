"""Names of kernels in tables: as torch's profiler gives them, and what is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.ops.kernel_names import MOST, short_name

COPY = (
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() "
    "const::{lambda()#7}::operator()() const::{lambda(float)#1}"
)
CAT = "at::native::(anonymous namespace)::CatArrayBatchedCopy"
CUTLASS = "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_ordered_kernel", "_ordered_kernel"),
        ("one_shot_all_reduce_add_rms_norm_kernel", "one_shot_all_reduce_add_rms_norm_kernel"),
        ("two_shot_all_reduce_add_rms_norm_kernel", "two_shot_all_reduce_add_rms_norm_kernel"),
        ("decode_kernel_0d1d2de3de45c", "decode_kernel"),
        ("decode_kernel_012", "decode_kernel_012"),
        ("nvjet_tst_192x128_64x5_2x1_v_bz_coopA_TNN", "nvjet_tst_192x128_64x5_2x1_v_bz_coopA_TNN"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
        ("Memset (Device)", "Memset"),
        (
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllGather_RING_LL",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<long>, "
            "std::array<char*, 1ul> >(int, at::native::FillFunctor<long>, std::array<char*, 1ul>)",
            "vectorized_elementwise_kernel<FillFunctor long>",
        ),
        (
            "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<"
            f"{COPY} >(at::TensorIteratorBase&, {COPY} const&)::{{lambda(int)#1}}>(int, float)",
            "elementwise_kernel<direct_copy_kernel_cuda float int>",
        ),
        (
            f"void {CAT}<at::native::(anonymous namespace)::OpaqueType<2u>, unsigned int, 1, 128>"
            "(at::native::(anonymous namespace)::OpaqueType<2u>*, unsigned int)",
            "CatArrayBatchedCopy<OpaqueType>",
        ),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, "
            "float, false, cublasGemvParamsEx<int> >(cublasGemvParamsEx<int>)",
            "kernel<int __nv_bfloat16 float cublasGemvParamsEx>",
        ),
        ("void cutlass::Kernel2<nothing>(nothing::Params)", "Kernel2<nothing>"),
    ],
)
def test_what_tells_kernels_apart_is_left(name, short):
    assert short_name(name) == short


def test_both_ends_of_a_long_name_are_left():
    short = short_name(f"void cutlass::Kernel2<{CUTLASS}>({CUTLASS}::Params)")
    assert len(short) == MOST
    assert short.startswith("Kernel2<cutlass_80_wmma_tens")
    assert short.endswith("..f16_16x16_128x2_tn_align8>")


@given(st.text(alphabet="aZ_0:<>(){}, #*", max_size=120))
def test_any_name_becomes_a_short_one(name):
    assert len(short_name(name)) <= MOST
    assert bool(short_name(name)) == bool(name)
