#pragma once

// The prompt lane of a MoE layer (moespac_llamacpp): more tokens than run hybrid, all experts computed on the device from *staging*
// memory. A weight of the layer (gate, up, down) is computed in *pieces*, some rows of every expert's at a time, and the pieces of all
// weights and layers go through three buffers in turn; biases, which are small, have a buffer each. What an ubatch uses is copied there,
// from the slots what is resident and over the link what is not, while the device computes what came before.
//
//   stage    before a product: its output is the piece in its buffer, complete for the experts that the tokens chose. The first one of
//            a layer brings what is missing in all buffers, since only now the choice is known
//   release  after it: the buffer is free, and gets the layer's next piece for it; or what the next layer is expected to need
//
// Both are GGML_OP_CUSTOM nodes in the stream's own order, marked like those of ggml-moe-stream.h; a ggml_moe_prompt_node is their user
// data. They act when they are launched, on the host: which copies there are is decided by the lane behind `work` (src/moe-prompt.cpp),
// the same for a device and for the CPU's emulation. The device makes them on streams of its own.
//
// A captured graph would repeat the copies of one ubatch: every graph with these nodes carries another GGML_MOE_STREAM_OWNER, so that
// none is ever the same as the last and none is captured.

#include "ggml-moe-stream.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GGML_MOE_PROMPT_WEIGHTS 3 // buffers that the pieces of weights take in turn
#define GGML_MOE_PROMPT_BUFFERS 6 // and those of the three biases

// beside ggml_moe_stream_kind
enum ggml_moe_prompt_kind {
    GGML_MOE_PROMPT_STAGE   = 16, // (staging, ids) -> view of staging
    GGML_MOE_PROMPT_RELEASE = 17, // (stage, its product) -> view of staging, which nobody reads
};

struct ggml_moe_prompt_copy {
    void *       to;
    const void * from;   // NULL: zeros
    size_t       n;      // bytes: of an expert's rows, or of the few behind them
    int32_t      buffer;
    bool         local;  // within the device, but for a few bytes; else over the link, from page-locked memory
};

// what a node has to do
struct ggml_moe_prompt_work {
    const struct ggml_moe_prompt_copy * copies; // valid until the next call; those to a buffer follow each other, and are of one piece
    int32_t n_copies;
    bool    first; // of the ubatch: the staging memory is free when all is done that was launched before
};

struct ggml_moe_prompt_node {
    int32_t kind;     // first, as in ggml_moe_stream_node
    int32_t row;
    int32_t piece;    // of the row
    int32_t buffer;
    void *  lane;
    void *  device;   // of ggml_moe_prompt_api::open
    int32_t * ids;    // page-locked host memory for the choice of an ubatch, [n_tokens][n_used]
    // all experts' rows of the piece in host memory, and their place
    void *       staging;
    const void * host;
    size_t       size;     // of an expert
    size_t       pitch;    // from one expert to the next in host memory; in staging memory it is the size
    int32_t      n_expert;
    // stage: must `work` be told what the tokens chose?
    bool (*wants_ids)(const struct ggml_moe_prompt_node * node);
    // ids: [n_ids], or NULL
    void (*work)(const struct ggml_moe_prompt_node * node, const int32_t * ids, int64_t n_ids, struct ggml_moe_prompt_work * work);
};

struct ggml_moe_prompt_api {
    void * (*open) (int device); // streams and events; NULL: the device has none left
    void   (*wait) (void * device); // until all copies are done
    void   (*close)(void * device);
};

#ifdef __cplusplus
}
#endif
