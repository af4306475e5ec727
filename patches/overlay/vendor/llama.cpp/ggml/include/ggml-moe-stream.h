#pragma once

// The in-stream execution of a hybrid MoE layer (moespac_llamacpp): operations that a device runs inside its own stream, with a
// pool of CPU threads on the other side. Nothing in a decode waits for the host but the join, and that only if something is cold.
//
//   publish  looks up the slots of the (token, expert) pairs. Only if one of them is cold (its expert has no slot) it hands the rows of
//            the tokens concerned to page-locked memory and raises the header's flag.
//   join     adds up the hot pairs' outputs; if a pair is cold, it waits for the pool and adds what the pool computed.
//
// The stream lane: while the pool works, the link would be idle. So publish lets some of the cold experts cross it, into slots whose
// experts the batch does not need ("victims", named by the host before the decode), and they are hot from then on. How many, follows
// from the measured rates of both sides: as many as make the layer end soonest, those with most tokens first. Join changes the map, and
// tells the host.
//
// Where the batch uses nearly all residents, there is no room for that. Then the layer is computed in two passes (GGML_MOE_STREAM_LATE):
// bring, between them, fills slots whose residents the first pass has used, and the second pass computes what it brought.
//
// The look-ahead: from publish to the next layer's publish the link would be idle again. The next layer's router, given this layer's
// input, names most of the experts that it is going to choose. Beside the stream, those that have no slot cross the link into victims of
// the next layer, as many as arrive until it begins: its publish waits for them. A wrong guess costs a resident of little value.
// Nothing else changes maps during a decode.
//
// All are GGML_OP_CUSTOM nodes that carry GGML_MOE_STREAM_MAGIC in op_params and a ggml_moe_stream_node as user data. A backend that
// can run them offers `ggml_moe_stream` (ggml_moe_stream_api) through its registry's get_proc_address. The CPU backend runs them by
// their custom function, which emulates the protocol (src/moe-stream.cpp).
//
// Everything that a kernel gets by value is fixed while the feature is attached, so that captured graphs stay valid; what changes
// (slot maps, flags) lies in memory.

#include "ggml.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GGML_MOE_STREAM_MAGIC_0 0x4d6f4553
#define GGML_MOE_STREAM_MAGIC_1 0x74726d36 // the layout of the structs below is part of it: a new layout takes a new number
#define GGML_MOE_STREAM_PARAM   14         // index of the magic in op_params; ggml_custom_4d uses the first six
#define GGML_MOE_STREAM_OWNER   12         // index of a number that no two graphs with different channels share: captured graphs hold
                                           // the channel by value, and are compared by the tensors' bytes

#define GGML_MOE_STREAM_MAX_STREAMED 8  // of a row, by publish
#define GGML_MOE_STREAM_MAX_AHEAD    8  // and before it
#define GGML_MOE_STREAM_MAX_VICTIMS  16 // so many can make room
#define GGML_MOE_STREAM_MAX_PARTS    6  // tensors of an expert

enum ggml_moe_stream_kind {
    GGML_MOE_STREAM_PUBLISH = 0, // (x, ids, weights, map, log of ids[, log of weights]) -> I32 [n_used, n_tokens, 4], see below
    GGML_MOE_STREAM_JOIN    = 1, // (hot outputs [n_embd, n_used, n] of consecutive tokens, ..., publish) -> F32 [n_embd, n_tokens]
                                 // (late: those of the first pass, then as many of the second)
    GGML_MOE_STREAM_BRING   = 2, // (hot outputs, ..., publish) -> I32 [n_used, n_tokens]: ids for the second pass
};

// planes of publish's output
enum ggml_moe_stream_plane {
    GGML_MOE_STREAM_SLOT   = 0, // ids for the products with the slots; of a cold pair: something that they may be given
    GGML_MOE_STREAM_WEIGHT = 1, // F32: by what the pair's output is multiplied
    GGML_MOE_STREAM_WHERE  = 2, // ggml_moe_stream_where
    GGML_MOE_STREAM_LATE   = 3, // as SLOT, for the second pass
    GGML_MOE_STREAM_PLANES = 4,
};

// who computes a pair
enum ggml_moe_stream_where {
    GGML_MOE_STREAM_FIRST_PASS  = 0,
    GGML_MOE_STREAM_BY_POOL     = 1,
    GGML_MOE_STREAM_SECOND_PASS = 2,
};

// in which form the pool gets a token's row
enum ggml_moe_stream_input {
    GGML_MOE_STREAM_F32  = 0,
    GGML_MOE_STREAM_Q8_K = 1, // n_embd is a multiple of 256
};

enum ggml_moe_stream_failure {
    GGML_MOE_STREAM_OK          = 0,
    GGML_MOE_STREAM_NO_ANSWER   = 1, // the device waited in vain for the pool
    GGML_MOE_STREAM_POOL_FAILED = 2, // the pool gave up a computation
};

// microseconds; of a byte of an expert's weights, where nothing else is said
enum ggml_moe_stream_rate {
    GGML_MOE_STREAM_POOL       = 0, // the pool, for the first token
    GGML_MOE_STREAM_POOL_TOKEN = 1, // for each further one
    GGML_MOE_STREAM_REQUEST    = 2, // that a request to the pool takes whatever it asks for
    GGML_MOE_STREAM_LINK       = 3, // the link
    GGML_MOE_STREAM_HOT        = 4, // that the layer takes on the device anyway
    // no rates, but they come with them
    GGML_MOE_STREAM_MOST       = 5, // experts of a row that publish may stream
    GGML_MOE_STREAM_AHEAD      = 6, // experts of a row that cross the link ahead, on the mean over the rows
    GGML_MOE_STREAM_WRONG      = 7, // share of the look-ahead's guesses that are replaced by others at random (for measurements)
    GGML_MOE_STREAM_TIME       = 8, // number of the decode
    GGML_MOE_STREAM_N_RATES    = 12,
};

enum ggml_moe_stream_counter {
    GGML_MOE_STREAM_STREAMED   = 0, // experts that crossed the link in publish
    GGML_MOE_STREAM_LOOKED     = 1, // that the look-ahead brought
    GGML_MOE_STREAM_RIGHT      = 2, // of these, those that the layer then chose
    GGML_MOE_STREAM_CROWDED    = 3, // that publish would have streamed had there been room; late: that took a slot whose resident was in use
    GGML_MOE_STREAM_N_COUNTERS = 4,
};

struct ggml_moe_stream_victim {
    int32_t slot;   // -1: none
    int32_t expert; // that the slot holds
};

struct ggml_moe_stream_told {
    int32_t slot;   // -1: this one has not changed
    int32_t expert; // that it holds now; -1: it has been written into, and join did not follow, since the graph was broken off in between
    int32_t late;   // 1: what it held left after the first pass
};

// what crosses the link
struct ggml_moe_stream_picks {
    int32_t row;
    int32_t n;
    int32_t n_left; // other cold experts: the pool's
    int32_t crowded; // GGML_MOE_STREAM_CROWDED
    int32_t victim[GGML_MOE_STREAM_MAX_VICTIMS]; // index
    int32_t expert[GGML_MOE_STREAM_MAX_VICTIMS]; // that takes its slot
};

struct ggml_moe_stream_channel {
    // page-locked host memory that the device addresses directly; one request is under way at a time
    uint64_t * header;  // seq << 32 | row << 16 | n_tokens; the device stores it last
    uint32_t * done;    // seq of the request that the pool has finished last
    uint32_t * failed;  // ggml_moe_stream_failure; once set, no join waits any more
    int32_t  * ids;     // [n_tokens][n_used]: the expert of a cold pair, -1: hot
    float    * weights; // [n_tokens][n_used]
    void     * x;       // [n_tokens] rows; only those of tokens with a cold pair are written
    float    * out;     // [n_tokens][n_embd]: the pool's sums
    uint64_t * clock;   // [n_rows][4] ns of the device's clock: publish began, join began, join ended, streaming ended (if there was any)
    uint64_t * bring_clock; // [n_rows] ns: bring began
    uint64_t * ahead_clock; // [n_rows][2] ns: the look-ahead for the row began, ended
    uint32_t * counters;    // [n_rows][N_COUNTERS], ever
    // [n_rows][MAX_VICTIMS] what has become of `victims` since the host looked
    struct ggml_moe_stream_told * victims_told;
    // device memory
    uint32_t * state;   // [0] seq of the last request; of the publish under way: [1] blocks that have handed over their part, [2] blocks that
                        // have streamed theirs, [3] the request has been made; [4] seq of the last request that join has seen answered;
                        // [5] blocks of the look-ahead under way that have brought their part
    uint32_t * counters_device;
    struct ggml_moe_stream_victim * victims; // [n_rows][MAX_VICTIMS]
    struct ggml_moe_stream_picks  * picks;   // publish's, for join
    struct ggml_moe_stream_picks  * ahead;   // the look-ahead's, for the next publish
    float       * ahead_x;      // [n_tokens][n_embd] publish's input, for the look-ahead beside the stream
    float       * ahead_scores; // [n_tokens][n_expert]
    const float * rates;   // [N_RATES]
    uint64_t timeout_ns;
    void *   side;         // of the backend: where the look-ahead runs
};

struct ggml_moe_stream_part {
    const char * host;  // the first expert's, page-locked
    char       * slots; // the first slot's, in device memory
    uint64_t     size;  // of one expert, a multiple of 16
};

struct ggml_moe_stream_node {
    int32_t kind;
    int32_t row;
    int32_t n_embd;
    int32_t n_used;
    int32_t input;         // ggml_moe_stream_input
    bool    late;          // in two passes
    bool    weight_before; // the router's weight was applied to the input: the outputs are added as they are
    const float * scale;   // device memory, [n_expert]: factor of an expert's output, or NULL
    int32_t * map;         // device memory, [n_expert]: the same as publish's source
    int32_t n_expert;
    int32_t n_parts;       // 0: the row has no stream lane
    uint64_t expert_bytes; // of all parts
    struct ggml_moe_stream_part parts[GGML_MOE_STREAM_MAX_PARTS];
    const struct ggml_moe_stream_channel * channel;
    // the row's router, for the look-ahead; device memory
    const float * gate;      // [n_expert][n_embd]
    const float * gate_bias; // [n_expert] or NULL
    bool gate_sigmoid;       // the bias is added to the scores' sigmoid
    const struct ggml_moe_stream_node * next; // publish's of the layer behind, NULL: there is no look-ahead
};

struct ggml_moe_prompt_api;

struct ggml_moe_stream_api {
    // For how many tokens at once a product with the experts `w` [n_in, n_out, n_slots] takes a kernel that skips pairs with id -1 (their
    // rows stay undefined), lets -1 occur several times and needs no help from the host. 0: there is no such kernel.
    int (*max_tokens)(int device, const struct ggml_tensor * w);
    // Does the driver kill kernels that run for seconds (a GPU with a display)?
    bool (*has_watchdog)(int device);
    // ggml_moe_stream_channel::side; NULL: there is none to be had
    void * (*side_open)(int device);
    void (*side_free)(void * side);
    // the prompt lane (ggml-moe-prompt.h)
    const struct ggml_moe_prompt_api * prompt;
};

static inline bool ggml_moe_stream_is(const struct ggml_tensor * op) {
    return op->op_params[GGML_MOE_STREAM_PARAM] == GGML_MOE_STREAM_MAGIC_0 && op->op_params[GGML_MOE_STREAM_PARAM + 1] == GGML_MOE_STREAM_MAGIC_1;
}

// of a GGML_OP_CUSTOM node: what ggml_custom_4d was given
static inline const struct ggml_moe_stream_node * ggml_moe_stream_node_of(const struct ggml_tensor * op) {
    struct custom_params { void * fun; int n_tasks; void * user_data; };
    return (const struct ggml_moe_stream_node *) ((const struct custom_params *) (const void *) op->op_params)->user_data;
}

#ifdef __cplusplus
}
#endif
