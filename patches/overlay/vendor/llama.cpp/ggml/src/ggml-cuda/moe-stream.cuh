#pragma once

#include "common.cuh"

// ggml-moe-stream.h on CUDA
bool ggml_cuda_moe_stream_supported(const ggml_tensor * op);
bool ggml_cuda_moe_stream(ggml_backend_cuda_context & ctx, ggml_tensor * dst); // false: not one of these operations
void ggml_cuda_moe_stream_end(ggml_backend_cuda_context & ctx);               // of a graph: what runs beside the stream belongs to it
const void * ggml_cuda_moe_stream_api();                                     // null: not in this build

// ggml-moe-prompt.h on CUDA
struct ggml_moe_prompt_api;
void ggml_cuda_moe_prompt(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
const ggml_moe_prompt_api * ggml_cuda_moe_prompt_api();
