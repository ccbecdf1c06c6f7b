/* lt_check.c - compiled, never run: what csrc/cuda/blaslt.h takes for granted of cublasLt.h. */
#include <cublasLt.h>

#include "cuda/blaslt.h"

#define SAME(a, b) _Static_assert((int)(a) == (int)(b), #a)
SAME(CUBLAS_STATUS_ALLOC_FAILED, OM_LT_ALLOC_FAILED);
SAME(CUBLAS_STATUS_ARCH_MISMATCH, OM_LT_ARCH_MISMATCH);
SAME(CUBLAS_STATUS_NOT_SUPPORTED, OM_LT_NOT_SUPPORTED);
SAME(CUDA_R_32F, OM_LT_R_32F);
SAME(CUDA_R_64F, OM_LT_R_64F);
SAME(CUDA_R_16F, OM_LT_R_16F);
SAME(CUDA_R_16BF, OM_LT_R_16BF);
SAME(CUBLAS_COMPUTE_32F, OM_LT_COMPUTE_32F);
SAME(CUBLAS_COMPUTE_64F, OM_LT_COMPUTE_64F);
SAME(CUBLAS_COMPUTE_32F_FAST_TF32, OM_LT_COMPUTE_TF32);
SAME(CUBLAS_OP_N, 0);
SAME(CUBLAS_OP_T, 1);
SAME(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, OM_LT_LAYOUT_BATCH);
SAME(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, OM_LT_LAYOUT_STRIDE);
SAME(CUBLASLT_MATMUL_DESC_TRANSA, OM_LT_DESC_TRANSA);
SAME(CUBLASLT_MATMUL_DESC_TRANSB, OM_LT_DESC_TRANSB);
SAME(CUBLASLT_MATMUL_DESC_EPILOGUE, OM_LT_DESC_EPILOGUE);
SAME(CUBLASLT_MATMUL_DESC_BIAS_POINTER, OM_LT_DESC_BIAS);
SAME(CUBLASLT_EPILOGUE_BIAS, OM_LT_EPILOGUE_BIAS);
SAME(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, OM_LT_WISH_SPACE);
SAME(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, OM_LT_WISH_REDUCTION);
SAME(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, OM_LT_WISH_ALIGN_A);
SAME(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, OM_LT_WISH_ALIGN_A + 3);
SAME(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, OM_LT_REDUCTION_COMPUTE_TYPE);
SAME(CUBLASLT_REDUCTION_SCHEME_MASK, OM_LT_REDUCTION_ANY);
SAME(sizeof(cublasLtMatmulHeuristicResult_t), sizeof(om_lt_choice));
SAME(sizeof(cublasLtMatmulAlgo_t), sizeof(((om_lt_choice *)0)->algo));
SAME(offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize), offsetof(om_lt_choice, space));
SAME(offsetof(cublasLtMatmulHeuristicResult_t, state), offsetof(om_lt_choice, state));
_Static_assert(sizeof(cublasLtMatrixLayoutOpaque_t) <= 32 * 8 && sizeof(cublasLtMatmulDescOpaque_t) <= 64 * 8 &&
                   sizeof(cublasLtMatmulPreferenceOpaque_t) <= 32 * 8,
               "room for descriptors");

/* Enumerations are int and handles pointers: calls with our types are calls with theirs. */
cublasStatus_t (*check_create)(cublasLtHandle_t *) = cublasLtCreate;
const char *(*check_name)(cublasStatus_t) = cublasLtGetStatusName;
cublasStatus_t (*check_layout)(cublasLtMatrixLayout_t, size_t, cudaDataType, uint64_t, uint64_t,
                               int64_t) = cublasLtMatrixLayoutInit_internal;
cublasStatus_t (*check_layout_set)(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t, const void *,
                                   size_t) = cublasLtMatrixLayoutSetAttribute;
cublasStatus_t (*check_desc)(cublasLtMatmulDesc_t, size_t, cublasComputeType_t,
                             cudaDataType_t) = cublasLtMatmulDescInit_internal;
cublasStatus_t (*check_desc_set)(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *,
                                 size_t) = cublasLtMatmulDescSetAttribute;
cublasStatus_t (*check_wish)(cublasLtMatmulPreference_t, size_t) = cublasLtMatmulPreferenceInit_internal;
cublasStatus_t (*check_wish_set)(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void *,
                                 size_t) = cublasLtMatmulPreferenceSetAttribute;
cublasStatus_t (*check_choose)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                               cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                               cublasLtMatmulHeuristicResult_t *, int *) = cublasLtMatmulAlgoGetHeuristic;
cublasStatus_t (*check_multiply)(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *,
                                 cublasLtMatrixLayout_t, const void *, cublasLtMatrixLayout_t, const void *,
                                 const void *, cublasLtMatrixLayout_t, void *, cublasLtMatrixLayout_t,
                                 const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t) = cublasLtMatmul;
