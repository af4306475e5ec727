#pragma once

// What is known about one MoE block of the model: its tensors, its activation, its slots on the device.

#include "llama-moe.h"
#include "moe-kernels.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

// gated activations of upstream's build_moe_ffn that both lanes know
enum moe_activation {
    MOE_ACT_SWIGLU,
    MOE_ACT_GEGLU,
    MOE_ACT_REGLU,
    MOE_ACT_SWIGLU_OAI,
};

// constants of build_moe_ffn's LLM_FFN_SWIGLU_OAI_MOE
constexpr float MOE_OAI_ALPHA = 1.702f;
constexpr float MOE_OAI_LIMIT = 7.0f;

// the tensors of a block; an expert is one slice of each (weights: dimension 2, biases: dimension 1)
enum moe_part {
    MOE_GATE,   // or the merged gate_up: gate rows first, then up rows
    MOE_UP,     // null if merged
    MOE_DOWN,
    MOE_GATE_B, // F32; merged as well if the weights are
    MOE_UP_B,
    MOE_DOWN_B,
    MOE_N_PARTS,
};

using moe_tensors = std::array<ggml_tensor *, MOE_N_PARTS>;

struct moe_block {
    int row = -1;
    int il  = -1;

    int n_expert = 0;
    int n_used   = 0;
    int n_embd   = 0;
    int n_ff     = 0;

    moe_activation act  = MOE_ACT_SWIGLU;
    bool merged         = false;
    bool weight_before  = false; // Llama-4: the router weight scales the expert's input, not its output
    moe_tensors host    = {};
    moe_kernel gate_kernel = {}; // of the cold lane, chosen at attach
    moe_kernel up_kernel   = {};
    moe_kernel down_kernel = {};
    ggml_tensor * down_scale = nullptr; // F32 [n_expert]: factor of the expert's output (Gemma-4)

    std::string fallback;        // why the block takes upstream's path; empty: hybrid

    bool hybrid() const { return fallback.empty(); }

    size_t expert_stride(int part) const {
        return part >= MOE_GATE_B ? host[part]->nb[1] : host[part]->nb[2];
    }

    size_t expert_bytes() const {
        size_t n = 0;
        for (int p = 0; p < MOE_N_PARTS; p++) {
            n += host[p] ? expert_stride(p) : 0;
        }
        return n;
    }

    // by what the router's weight is multiplied in the sum
    float output_scale(int expert) const {
        return down_scale ? ((const float *) down_scale->data)[expert] : 1.0f;
    }

    const char * expert_data(int part, int expert) const {
        return (const char *) host[part]->data + expert*expert_stride(part);
    }
};

// ggml-cpu's table of vec_dot and from_float, reached through its registry so that it also works with GGML_BACKEND_DL
typedef const ggml_type_traits_cpu * (*moe_type_traits_t)(ggml_type type);
moe_type_traits_t moe_cpu_type_traits();
