// The C API over llama_moe_state (include/llama-moe.h).

#include "llama-moe.h"

#include "llama-context.h"
#include "moe-state.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <exception>

static thread_local std::string last_error;

static int32_t fail(int32_t status, const std::string & message) {
    last_error = message;
    return status;
}

static llama_moe_state * state_of(const llama_context * ctx) {
    return ctx && ctx->moe && !ctx->moe->graphs_only ? ctx->moe.get() : nullptr;
}

static int32_t not_attached() {
    return fail(LLAMA_MOE_NOT_ATTACHED, "no per-expert residency is attached to this context");
}

static int32_t in_flight() {
    return fail(LLAMA_MOE_IN_FLIGHT, "a decode is in flight: call llama_synchronize (or read its logits) first");
}

static const char * const DEVICE_FAILED = "the device lane failed: all experts are computed on the CPU (detach and attach to try the device again)";

// the layer of a row that can have slots, or null with the status set
static moe_layer * hybrid_layer(llama_moe_state & st, int32_t row, int32_t expert, int32_t & status) {
    moe_layer * l = st.layer(row);
    if (!l) {
        status = fail(LLAMA_MOE_OUT_OF_RANGE, "row " + std::to_string(row) + " has no experts (there are " + std::to_string(st.rows.size()) + " rows)");
        return nullptr;
    }
    if (!l->block.hybrid()) {
        status = fail(LLAMA_MOE_UNSUPPORTED, "row " + std::to_string(row) + " takes llama.cpp's own path: " + l->block.fallback);
        return nullptr;
    }
    if (expert < 0 || expert >= l->block.n_expert) {
        status = fail(LLAMA_MOE_OUT_OF_RANGE, "row " + std::to_string(row) + " has experts 0 to " + std::to_string(l->block.n_expert - 1) + ", not " + std::to_string(expert));
        return nullptr;
    }
    return l;
}

static std::string expert_at(int32_t row, int32_t expert) {
    return "expert " + std::to_string(expert) + " of row " + std::to_string(row);
}

static std::string streamed_out_of_range(int n) {
    return std::to_string(n) + " experts of a row shall be streamed, it must be from 0 to " + std::to_string(GGML_MOE_STREAM_MAX_STREAMED);
}

static std::string ahead_out_of_range(int n) {
    return "the look-ahead shall bring " + std::to_string(n) + " experts of a row, it must be from 0 to " + std::to_string(GGML_MOE_STREAM_MAX_AHEAD);
}

struct llama_moe_params llama_moe_default_params(void) {
    return {
        /*.device           =*/ nullptr,
        /*.execution        =*/ LLAMA_MOE_AUTO,
        /*.pool_threads     =*/ 0,
        /*.timeout_ms       =*/ 10000,
        /*.max_batch_tokens =*/ 32,
        /*.stream_experts   =*/ 0,
        /*.look_ahead       =*/ 0,
        /*.own_kernels      =*/ true,
        /*.cache_graphs     =*/ true,
        /*.perf             =*/ false,
        /*.whole_layers     =*/ true,
        /*.prompt_lane      =*/ true,
        /*.prompt_share     =*/ 0,
    };
}

const char * llama_moe_error(void) {
    return last_error.c_str();
}

int32_t llama_moe_attach(llama_context * ctx, llama_moe_params params) {
    if (!ctx) {
        return fail(LLAMA_MOE_INVALID_ARGUMENT, "the context is NULL");
    }
    if (state_of(ctx)) {
        return fail(LLAMA_MOE_ALREADY_ATTACHED, "per-expert residency is attached to this context already");
    }
    if (params.max_batch_tokens < 1 || params.max_batch_tokens > 512) {
        return fail(LLAMA_MOE_INVALID_ARGUMENT, "max_batch_tokens is " + std::to_string(params.max_batch_tokens) + ", it must be from 1 to 512");
    }
    if (params.execution < LLAMA_MOE_AUTO || params.execution > LLAMA_MOE_IN_STREAM) {
        return fail(LLAMA_MOE_INVALID_ARGUMENT, "there is no execution " + std::to_string(params.execution));
    }
    if (params.pool_threads < 0 || params.pool_threads > moe_pool::MAX_THREADS) {
        return fail(LLAMA_MOE_INVALID_ARGUMENT, "pool_threads is " + std::to_string(params.pool_threads) + ", it must be from 0 to " + std::to_string(moe_pool::MAX_THREADS));
    }
    if (params.timeout_ms < 1) {
        return fail(LLAMA_MOE_INVALID_ARGUMENT, "timeout_ms is " + std::to_string(params.timeout_ms) + ", it must be at least 1");
    }
    if (params.stream_experts < 0 || params.stream_experts > GGML_MOE_STREAM_MAX_STREAMED) {
        return fail(LLAMA_MOE_INVALID_ARGUMENT, streamed_out_of_range(params.stream_experts));
    }
    if (params.prompt_share < 0 || params.prompt_share > MOE_MAX_PROMPT_SHARE) {
        return fail(LLAMA_MOE_INVALID_ARGUMENT, "prompt_share is " + std::to_string(params.prompt_share) + ", it must be from 0 to " + std::to_string(MOE_MAX_PROMPT_SHARE));
    }
    if (params.look_ahead < 0 || params.look_ahead > GGML_MOE_STREAM_MAX_AHEAD) {
        return fail(LLAMA_MOE_INVALID_ARGUMENT, ahead_out_of_range(params.look_ahead));
    }
    std::string error;
    int32_t status;
    try {
        llama_synchronize(ctx);
        ctx->moe.reset(new llama_moe_state(*ctx, params));
        status = ctx->moe->attach(error);
    } catch (const std::exception & e) {
        error  = e.what();
        status = LLAMA_MOE_FAILED;
    }
    if (status != LLAMA_MOE_OK) {
        llama_moe_detach(ctx);
        return fail(status, error);
    }
    return LLAMA_MOE_OK;
}

int32_t llama_moe_detach(llama_context * ctx) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return LLAMA_MOE_OK;
    }
    llama_synchronize(ctx);
    try {
        ctx->moe_detach();
    } catch (const std::exception & e) {
        return fail(LLAMA_MOE_FAILED, e.what());
    }
    return LLAMA_MOE_OK;
}

int32_t llama_moe_keep_graphs(llama_context * ctx, int32_t max_tokens) {
    if (!ctx) {
        return fail(LLAMA_MOE_INVALID_ARGUMENT, "the context is NULL");
    }
    if (state_of(ctx)) {
        return fail(LLAMA_MOE_ALREADY_ATTACHED, "per-expert residency is attached to this context: it keeps graphs already");
    }
    if (max_tokens < 0 || max_tokens > 512) {
        return fail(LLAMA_MOE_INVALID_ARGUMENT, "graphs of up to " + std::to_string(max_tokens) + " tokens shall be kept, it must be from 0 to 512");
    }
    llama_synchronize(ctx);
    try {
        ctx->moe_detach();
        if (max_tokens > 0) {
            llama_moe_params params = llama_moe_default_params();
            params.max_batch_tokens = max_tokens;
            ctx->moe.reset(new llama_moe_state(*ctx, params));
            ctx->moe->graphs_only = true;
        }
    } catch (const std::exception & e) {
        return fail(LLAMA_MOE_FAILED, e.what());
    }
    return LLAMA_MOE_OK;
}

int32_t llama_moe_n_rows(const llama_context * ctx) {
    const llama_moe_state * st = state_of(ctx);
    return st ? (int32_t) st->rows.size() : 0;
}

int32_t llama_moe_n_expert(const llama_context * ctx) {
    const llama_moe_state * st = state_of(ctx);
    return st ? st->log.n_expert : 0;
}

int32_t llama_moe_row(const llama_context * ctx, int32_t row, llama_moe_row_info * info) {
    const llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    if (row < 0 || row >= (int32_t) st->rows.size()) {
        return fail(LLAMA_MOE_OUT_OF_RANGE, "there is no row " + std::to_string(row) + " (there are " + std::to_string(st->rows.size()) + ")");
    }
    const moe_layer * l = st->layer(row);
    *info = {};
    info->il       = -1;
    info->fallback = "";
    info->portable = "";
    info->kernel   = "";
    if (l) {
        info->il            = l->block.il;
        info->n_expert      = l->block.n_expert;
        info->n_expert_used = l->block.n_used;
        info->n_slots       = (int32_t) l->slots.slots.size();
        info->expert_bytes  = (int64_t) l->block.expert_bytes();
        info->hybrid        = l->fallback_now.empty() && !st->device_failed;
        info->whole         = info->hybrid && l->whole;
        info->in_stream     = info->hybrid && !info->whole && st->stream_on && l->stream_reason.empty();
        info->portable      = info->hybrid && !info->whole && !info->in_stream ? (l->stream_reason.empty() ? "a thread of the pool hangs" : l->stream_reason.c_str()) : "";
        info->streams       = info->in_stream && st->stream->streams(*l);
        info->two_passes    = info->streams && st->stream->in_two_passes();
        info->pinned        = l->pinned;
        info->fallback      = l->fallback_now.empty() && st->device_failed ? DEVICE_FAILED : l->fallback_now.c_str();
        info->kernel        = l->kernels.c_str();
    }
    return LLAMA_MOE_OK;
}

int32_t llama_moe_set_slots(llama_context * ctx, const int32_t * n_slots) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    if (st->in_flight) {
        return in_flight();
    }
    std::string error;
    const int32_t status = st->set_slots(n_slots, error);
    return status == LLAMA_MOE_OK ? status : fail(status, error);
}

int32_t llama_moe_set_execution(llama_context * ctx, int32_t execution) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    if (st->in_flight) {
        return in_flight();
    }
    if (execution < LLAMA_MOE_AUTO || execution > LLAMA_MOE_IN_STREAM) {
        return fail(LLAMA_MOE_INVALID_ARGUMENT, "there is no execution " + std::to_string(execution));
    }
    std::string error;
    const int32_t status = st->set_execution(execution, error);
    return status == LLAMA_MOE_OK ? status : fail(status, error);
}

int32_t llama_moe_set_streaming(llama_context * ctx, int32_t max_experts, bool always) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    if (st->in_flight) {
        return in_flight();
    }
    if (max_experts < 0 || max_experts > GGML_MOE_STREAM_MAX_STREAMED) {
        return fail(LLAMA_MOE_INVALID_ARGUMENT, streamed_out_of_range(max_experts));
    }
    st->params.stream_experts = max_experts;
    st->stream_always = always;
    if (st->stream) {
        st->stream->set_streaming(max_experts, always);
    }
    return LLAMA_MOE_OK;
}

int32_t llama_moe_set_look_ahead(llama_context * ctx, int32_t max_experts, float wrong) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    if (st->in_flight) {
        return in_flight();
    }
    if (max_experts < 0 || max_experts > GGML_MOE_STREAM_MAX_AHEAD) {
        return fail(LLAMA_MOE_INVALID_ARGUMENT, ahead_out_of_range(max_experts));
    }
    if (!(wrong >= 0 && wrong <= 1)) {
        return fail(LLAMA_MOE_INVALID_ARGUMENT, "a share of " + std::to_string(wrong) + " of the guesses shall be wrong, it must be from 0 to 1");
    }
    st->params.look_ahead = max_experts;
    st->ahead_wrong = wrong;
    if (st->stream) {
        st->stream->set_look_ahead(max_experts, wrong);
    }
    return LLAMA_MOE_OK;
}

int32_t llama_moe_set_values(llama_context * ctx, const float * values) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    if (st->stream) {
        st->stream->set_values(values);
    }
    return LLAMA_MOE_OK;
}

void llama_moe_prompt_bytes(const llama_context * ctx, int64_t * from_slots, int64_t * over_link, int64_t * ahead, int64_t * in_vain) {
    const llama_moe_state * st = state_of(ctx);
    const bool any = st && st->prompt;
    *from_slots = any ? st->prompt->bytes.from_slots : 0;
    *over_link  = any ? st->prompt->bytes.over_link  : 0;
    *ahead      = any ? st->prompt->bytes.ahead      : 0;
    *in_vain    = any ? st->prompt->bytes.in_vain    : 0;
}

const char * llama_moe_failure(llama_context * ctx) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return "";
    }
    if (st->in_flight) {
        llama_synchronize(ctx);
    }
    return st->failure.c_str();
}

int32_t llama_moe_inject_pool_fault(llama_context * ctx, int32_t thread, int32_t sleep_ms) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    if (!st->stream) {
        return fail(LLAMA_MOE_UNSUPPORTED, "no layer is computed in-stream");
    }
    st->stream->threads().inject_fault(thread, sleep_ms);
    return LLAMA_MOE_OK;
}

int32_t llama_moe_pool_threads(const llama_context * ctx) {
    const llama_moe_state * st = state_of(ctx);
    return st && st->stream ? st->stream->threads().size() : 0;
}

int64_t llama_moe_device_bytes(const llama_context * ctx) {
    const llama_moe_state * st = state_of(ctx);
    return st ? st->device_bytes() : 0;
}

int64_t llama_moe_prompt_memory(const llama_context * ctx) {
    const llama_moe_state * st = state_of(ctx);
    return st && st->prompt ? (int64_t) st->prompt->device_bytes() : 0;
}

static int32_t load_one(llama_moe_state & st, int32_t row, int32_t expert, bool wake) {
    int32_t status = LLAMA_MOE_OK;
    moe_layer * l = hybrid_layer(st, row, expert, status);
    if (!l) {
        return status;
    }
    if (st.device_failed) {
        return fail(LLAMA_MOE_FAILED, DEVICE_FAILED);
    }
    status = st.residency->load(l->block, l->slots, expert, wake);
    switch (status) {
        case LLAMA_MOE_ALREADY_RESIDENT:
            return fail(status, expert_at(row, expert) + " is resident or on its way already");
        case LLAMA_MOE_NO_FREE_SLOT:
            return fail(status, "no free slot for " + expert_at(row, expert) + ": all " + std::to_string(l->slots.slots.size()) + " are taken");
        default:
            return status;
    }
}

// the caller tells st that the placement has changed
static int32_t evict_one(llama_moe_state & st, int32_t row, int32_t expert) {
    int32_t status = LLAMA_MOE_OK;
    moe_layer * l = hybrid_layer(st, row, expert, status);
    if (!l) {
        return status;
    }
    status = st.residency->evict(l->slots, expert);
    return status == LLAMA_MOE_OK ? status : fail(status, expert_at(row, expert) + " is not resident");
}

// Calls one(row, expert) for each of the n; how many were done. The last error is that of the first that was not.
template <typename F> static int32_t each(int32_t n, const int32_t * rows, const int32_t * experts, int32_t * status, const F & one) {
    int32_t n_done = 0;
    std::string first;
    for (int32_t i = 0; i < n; i++) {
        const int32_t found = one(rows[i], experts[i]);
        if (found == LLAMA_MOE_OK) {
            n_done++;
        } else if (first.empty()) {
            first = last_error;
        }
        if (status) {
            status[i] = found;
        }
    }
    if (n_done < n) {
        last_error = first;
    }
    return n_done;
}

static int32_t no_list(int32_t n, const int32_t * rows, const int32_t * experts) {
    return n < 0 || (n > 0 && (!rows || !experts)) ? fail(LLAMA_MOE_INVALID_ARGUMENT, "a list of " + std::to_string(n) + " experts, or none at all") : LLAMA_MOE_OK;
}

int32_t llama_moe_load(llama_context * ctx, int32_t row, int32_t expert) {
    llama_moe_state * st = state_of(ctx);
    return st ? load_one(*st, row, expert, true) : not_attached();
}

int32_t llama_moe_load_many(llama_context * ctx, int32_t n, const int32_t * rows, const int32_t * experts, int32_t * status) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    if (const int32_t error = no_list(n, rows, experts)) {
        return error;
    }
    const int32_t n_done = each(n, rows, experts, status, [&](int32_t row, int32_t expert) { return load_one(*st, row, expert, false); });
    if (n_done > 0) {
        st->residency->wake(); // once: waking a thread takes longer than all the rest
    }
    return n_done;
}

int32_t llama_moe_evict(llama_context * ctx, int32_t row, int32_t expert) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    if (st->in_flight) {
        return in_flight();
    }
    const int32_t status = evict_one(*st, row, expert);
    if (status == LLAMA_MOE_OK) {
        st->placement_changed();
    }
    return status;
}

int32_t llama_moe_evict_many(llama_context * ctx, int32_t n, const int32_t * rows, const int32_t * experts, int32_t * status) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    if (st->in_flight) {
        return in_flight();
    }
    if (const int32_t error = no_list(n, rows, experts)) {
        return error;
    }
    const int32_t n_done = each(n, rows, experts, status, [&](int32_t row, int32_t expert) { return evict_one(*st, row, expert); });
    if (n_done > 0) {
        st->placement_changed();
    }
    return n_done;
}

int32_t llama_moe_publish(llama_context * ctx) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    if (st->in_flight) {
        return in_flight();
    }
    int32_t n = 0;
    for (auto & l : st->layers) {
        n += l->block.hybrid() ? st->residency->publish(l->slots) : 0;
    }
    if (n > 0) {
        st->placement_changed();
    }
    return n;
}

int32_t llama_moe_sync(llama_context * ctx) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    st->residency->sync();
    return LLAMA_MOE_OK;
}

int32_t llama_moe_residency(const llama_context * ctx, int32_t row, uint8_t * states) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    int32_t status = LLAMA_MOE_OK;
    moe_layer * l = hybrid_layer(*st, row, 0, status);
    if (l) {
        st->residency->states(l->slots, states);
    }
    return status;
}

int32_t llama_moe_residency_table(const llama_context * ctx, uint8_t * states) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    const int n_expert = st->log.n_expert;
    std::fill(states, states + st->rows.size()*n_expert, (uint8_t) LLAMA_MOE_COLD);
    for (const moe_layer * l : st->rows) {
        if (l && l->block.hybrid()) {
            st->residency->states(l->slots, states + (size_t) l->block.row*n_expert);
        }
    }
    return LLAMA_MOE_OK;
}

const int32_t * llama_moe_counts(llama_context * ctx) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        not_attached();
        return nullptr;
    }
    if (st->in_flight) {
        llama_synchronize(ctx);
    }
    return st->log.counts.data();
}

const int32_t * llama_moe_choices(llama_context * ctx, int32_t ubatch, int32_t * n_tokens, int32_t * n_expert_used) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        not_attached();
        return nullptr;
    }
    if (st->in_flight) {
        llama_synchronize(ctx);
    }
    *n_expert_used = st->log.n_used;
    return st->log.choices(ubatch, *n_tokens);
}

int32_t llama_moe_set_router_callback(llama_context * ctx, llama_moe_router_callback callback, void * user_data) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    if (st->in_flight) {
        return in_flight();
    }
    st->set_callback(callback, user_data);
    return LLAMA_MOE_OK;
}

int32_t llama_moe_perf(const llama_context * ctx, int32_t row, llama_moe_perf_data * data) {
    const llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    const moe_layer * l = st->layer(row);
    if (!l) {
        return fail(LLAMA_MOE_OUT_OF_RANGE, "row " + std::to_string(row) + " has no experts");
    }
    *data = l->perf;
    st->residency->load_stats(l->slots, data->n_loads, data->n_load_bytes);
    return LLAMA_MOE_OK;
}

int32_t llama_moe_perf_reset(llama_context * ctx, bool take_times) {
    llama_moe_state * st = state_of(ctx);
    if (!st) {
        return not_attached();
    }
    st->params.perf = take_times;
    for (auto & l : st->layers) {
        l->perf = {};
        st->residency->reset_stats(l->slots);
    }
    if (st->stream) {
        st->stream->reset_times();
    }
    return LLAMA_MOE_OK;
}

void llama_moe_graph_stats(const llama_context * ctx, int64_t * n_reused, int64_t * n_built) {
    const llama_moe_state * st = state_of(ctx);
    *n_reused = st ? st->n_reused : 0;
    *n_built  = st ? st->n_ubatches - *n_reused : 0;
}

void llama_moe_host_bytes(const llama_context * ctx, int64_t * total, int64_t * pinned) {
    const llama_moe_state * st = state_of(ctx);
    *total = *pinned = 0;
    if (!st) {
        return;
    }
    for (const auto & l : st->layers) {
        if (l->block.hybrid()) {
            const int64_t n = (int64_t) l->block.n_expert*l->block.expert_bytes();
            *total  += n;
            *pinned += l->pinned ? n : 0;
        }
    }
}

// Tokens are taken in groups, GROUPS apart (neighbours in a vocabulary are often alike). The groups' maxima are logits themselves: a value
// that n of them reach is reached by n tokens at least, and only groups whose maximum reaches it need a closer look.
static constexpr int GROUPS    = 4096;
static constexpr int MIN_GROUP = 4; // in smaller groups nothing is gained

static constexpr int LANES     = 16; // maxima that do not wait for each other

#if defined(__GNUC__) && defined(__x86_64__)
#define FOR_EVERY_WIDTH inline __attribute__((always_inline))
#else
#define FOR_EVERY_WIDTH inline
#endif

// The maxima of the groups and the largest of all; false if there is a NaN.
static FOR_EVERY_WIDTH bool group_maxima_of(const float * __restrict logits, int n_rows, float * __restrict maxima, float & top) {
    std::fill(maxima, maxima + GROUPS, -INFINITY);
    int32_t any_nan = 0;
    for (int i = 0; i < n_rows; i++) {
        const float * __restrict row = logits + (size_t) i*GROUPS;
        for (int g = 0; g < GROUPS; g++) {
            maxima[g] = maxima[g] < row[g] ? row[g] : maxima[g];
            any_nan  |= row[g] != row[g];
        }
    }
    float best[LANES];
    std::copy(maxima, maxima + LANES, best);
    for (int g = LANES; g < GROUPS; g += LANES) {
        for (int k = 0; k < LANES; k++) {
            best[k] = best[k] < maxima[g + k] ? maxima[g + k] : best[k];
        }
    }
    top = *std::max_element(best, best + LANES);
    return any_nan == 0;
}

#if defined(__GNUC__) && defined(__x86_64__)
__attribute__((target("avx2"))) static bool group_maxima_avx2(const float * logits, int n_rows, float * maxima, float & top) {
    return group_maxima_of(logits, n_rows, maxima, top);
}

static bool group_maxima(const float * logits, int n_rows, float * maxima, float & top) {
    static const bool wide = __builtin_cpu_supports("avx2");
    return wide ? group_maxima_avx2(logits, n_rows, maxima, top) : group_maxima_of(logits, n_rows, maxima, top);
}
#else
static bool group_maxima(const float * logits, int n_rows, float * maxima, float & top) {
    return group_maxima_of(logits, n_rows, maxima, top);
}
#endif

int32_t llama_moe_likeliest(const float * logits, int32_t n_vocab, int32_t n, llama_moe_search * search, llama_token_data * out, int32_t n_out) {
    if (n < 1 || n_vocab < MIN_GROUP*GROUPS || 4*(int64_t) n > GROUPS) {
        return 0;
    }
    float maxima[GROUPS];
    const int n_rows = n_vocab/GROUPS;
    float top = 0;
    if (!group_maxima(logits, n_rows, maxima, top) || !std::isfinite(top)) {
        return 0;
    }
    float low = top - search->gap;
    const auto n_reach = std::count_if(maxima, maxima + GROUPS, [&](float m) { return m >= low; });
    if (n_reach < n || n_reach > 2*n) {
        float sorted[GROUPS];
        std::copy(maxima, maxima + GROUPS, sorted);
        float * at = sorted + GROUPS - n*4/3 - 1; // a little more than asked for, so that the guess lasts
        std::nth_element(sorted, at, sorted + GROUPS);
        low  = *at;
        search->gap = std::isfinite(low) ? top - low : INFINITY;
    }
    if (!std::isfinite(low)) {
        return 0;
    }
    int32_t groups[GROUPS];
    int n_groups = 0;
    for (int g = 0; g < GROUPS; g++) {
        groups[n_groups] = g;
        n_groups += maxima[g] >= low;
    }
    int32_t n_found = 0;
    bool room = true;
    auto look_at = [&](int32_t id) {
        if (logits[id] >= low && (room = n_found < n_out)) {
            out[n_found++] = { id, logits[id], 0.0f };
        }
    };
    for (int i = 0; i < n_rows && room; i++) {
        for (int k = 0; k < n_groups && room; k++) {
            look_at(i*GROUPS + groups[k]);
        }
    }
    for (int32_t id = n_rows*GROUPS; id < n_vocab && room; id++) {
        if (!(logits[id] < INFINITY)) { // NaN too
            return 0;
        }
        look_at(id);
    }
    if (!room || n_found == 0) {
        return 0;
    }
    const llama_token_data * best = std::max_element(out, out + n_found, [](const auto & a, const auto & b) { return a.logit < b.logit; });
    search->edge   = low;
    search->best   = best->id;
    search->n_near = (int32_t) std::count_if(out, out + n_found, [&](const auto & x) { return x.logit >= best->logit - search->near; });
    return n_found;
}

const char * llama_moe_kernel_isa(void) {
    return moe_kernel_isa();
}

int32_t llama_moe_set_kernel_limit(int32_t level) {
    return moe_kernel_set_isa_limit(level);
}
