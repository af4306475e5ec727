#include "moe-state.h"

#include "llama-adapter.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>

moe_type_traits_t moe_cpu_type_traits() {
    ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_t reg = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
    return reg ? (moe_type_traits_t) ggml_backend_reg_get_proc_address(reg, "ggml_get_type_traits_cpu") : nullptr;
}

llama_moe_state::llama_moe_state(llama_context & ctx, const llama_moe_params & params) :
    ctx(ctx), params(params), graphs(ctx, params.max_batch_tokens) {}

llama_moe_state::~llama_moe_state() {
    residency.reset(); // its thread may be writing into slots
    prompt.reset();    // its copies read slots
    stream.reset();    // so may the pool's into buffers
    graphs.restore();
}

void llama_moe_state_deleter::operator()(llama_moe_state * state) const {
    delete state;
}

static uint64_t next_epoch() {
    static std::atomic<uint64_t> next{1};
    return next++;
}

void llama_moe_state::new_epoch() {
    epoch = lasting_epoch = next_epoch();
}

// all graphs that there are hold what is no longer so
void llama_moe_state::changed_graphs() {
    new_epoch();
    graphs.clear();
    ctx.sched_need_reserve = true;
}

void llama_moe_state::passes_changed(int n_tokens) {
    if (!graphs.drop(n_tokens)) { // the context's own graph serves it
        changed_graphs();
    }
}

void llama_moe_state::fail(const std::string & what) {
    failure = what;
    LLAMA_LOG_ERROR("moe: %s\n", what.c_str());
}

//
// which blocks there are, and which of them run hybrid
//

static bool known_activation(int type_op, moe_activation & act) {
    switch (type_op) {
        case LLM_FFN_SILU:           act = MOE_ACT_SWIGLU;     return true;
        case LLM_FFN_GELU:           act = MOE_ACT_GEGLU;      return true;
        case LLM_FFN_RELU:           act = MOE_ACT_REGLU;      return true;
        case LLM_FFN_SWIGLU_OAI_MOE: act = MOE_ACT_SWIGLU_OAI; return true;
        default: return false;
    }
}

// "" if the tensor can be uploaded slice by slice and read by vec_dot
static std::string host_problem(const ggml_tensor * t, int part, moe_type_traits_t traits) {
    const std::string name = ggml_get_name(t);
    if (!t->buffer) {
        return name + " has no memory";
    }
    const char * buft = ggml_backend_buft_name(ggml_backend_buffer_get_type(t->buffer));
    if (!ggml_backend_buffer_is_host(t->buffer)) {
        return name + " is in " + buft + " memory, not in plain host memory";
    }
    if (part >= MOE_GATE_B) {
        return t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) ? "" : name + " is not F32";
    }
    const ggml_type_traits_cpu * tr = traits(t->type);
    if (!tr->vec_dot || (tr->vec_dot_type != GGML_TYPE_F32 && !traits(tr->vec_dot_type)->from_float)) {
        return std::string("the CPU has no product for ") + ggml_type_name(t->type) + " (" + name + ")";
    }
    return ggml_is_contiguous(t) ? "" : name + " is not contiguous";
}

static std::string why_not_hybrid(const llama_moe_ffn & f, moe_block & b, const llama_hparams & hparams, moe_type_traits_t traits) {
    const ggml_tensor * gate = f.tensors[MOE_GATE];
    const ggml_tensor * up   = f.tensors[MOE_UP];
    const ggml_tensor * down = f.tensors[MOE_DOWN];
    if (!gate || (!f.merged && !up)) {
        return "experts without a gate matrix are not covered";
    }
    if (f.scaled) {
        return "per-expert scales of gate or up are not covered";
    }
    if (f.down_scale && (f.tensors[MOE_DOWN_B] || f.weight_before)) { // the scale is taken into the router's weight
        return "per-expert scales together with biases or weighted inputs are not covered";
    }
    if (f.down_scale && (f.down_scale->type != GGML_TYPE_F32 || !f.down_scale->buffer || !ggml_backend_buffer_is_host(f.down_scale->buffer))) {
        return std::string(ggml_get_name(f.down_scale)) + " is not F32 in host memory";
    }
    if (f.precise) {
        return "a precision override on the experts' products is not covered";
    }
    if (!known_activation(f.type_op, b.act)) {
        return "the experts' activation is not covered";
    }
    if (f.type_op == LLM_FFN_SILU && f.il >= 0 && hparams.swiglu_clamp_exp[f.il] > 1e-6f) {
        return "clamped SwiGLU is not covered";
    }
    const int64_t n_ff = f.merged ? gate->ne[1]/2 : gate->ne[1];
    if (gate->ne[0] != f.cur->ne[0] || down->ne[1] != f.cur->ne[0] || down->ne[0] != n_ff || (up && (up->ne[0] != gate->ne[0] || up->ne[1] != n_ff))) {
        return "the experts' matrices have unusual shapes";
    }
    for (int p = 0; p < MOE_N_PARTS; p++) {
        if (f.tensors[p]) {
            const std::string problem = host_problem(f.tensors[p], p, traits);
            if (!problem.empty()) {
                return problem;
            }
        }
    }
    return "";
}

void llama_moe_state::discover(const llm_graph_context & g, const llama_moe_ffn & f) {
    if (by_down.count(f.tensors[MOE_DOWN])) {
        return;
    }
    auto l = std::make_unique<moe_layer>();
    moe_block & b = l->block;
    b.il            = f.il;
    b.n_expert      = (int) f.tensors[MOE_DOWN]->ne[2];
    b.n_used        = (int) f.ids->ne[0];
    b.n_embd        = (int) f.cur->ne[0];
    b.n_ff          = (int) f.tensors[MOE_DOWN]->ne[0];
    b.merged        = f.merged;
    b.weight_before = f.weight_before;
    b.host          = f.tensors;
    b.down_scale    = f.down_scale;
    b.fallback      = why_not_hybrid(f, b, g.hparams, moe_cpu_type_traits());
    l->state        = this;
    by_down[f.tensors[MOE_DOWN]] = l.get();
    layers.push_back(std::move(l));
}

//
// attach
//

static ggml_backend_dev_t default_device() {
    for (auto type : { GGML_BACKEND_DEVICE_TYPE_GPU, GGML_BACKEND_DEVICE_TYPE_IGPU, GGML_BACKEND_DEVICE_TYPE_CPU }) {
        if (ggml_backend_dev_t dev = ggml_backend_dev_by_type(type)) {
            return dev;
        }
    }
    return nullptr;
}

static bool host_pinned(const moe_block & b, ggml_backend_buffer_type_t host_buft) {
    for (int p : { MOE_GATE, MOE_UP, MOE_DOWN }) {
        if (b.host[p] && ggml_backend_buffer_get_type(b.host[p]->buffer) != host_buft) {
            return false;
        }
    }
    return true;
}

int32_t llama_moe_state::attach(std::string & error) {
    if (!moe_cpu_type_traits()) {
        error = "the CPU backend in use does not tell its kernels (ggml_get_type_traits_cpu): is it from an unpatched build?";
        return LLAMA_MOE_NO_DEVICE;
    }
    ggml_backend_dev_t dev = params.device ? params.device : default_device();
    if (!dev) {
        error = "ggml has no device";
        return LLAMA_MOE_NO_DEVICE;
    }
    cold   = std::make_unique<moe_cold_lane>(moe_cpu_type_traits(), params.own_kernels);
    device = std::make_unique<moe_device_lane>(dev, params.max_batch_tokens);
    if (!device->init(error)) {
        return LLAMA_MOE_NO_DEVICE;
    }

    // one reserve with the hook listening: every architecture shows its blocks in the same way
    {
        struct restore_t { // also if the reserve throws
            llama_moe_state & st;
            const bool warmup;
            ~restore_t() {
                st.discovering        = false;
                st.ctx.cparams.warmup = warmup;
            }
        } restore{ *this, ctx.cparams.warmup };
        ctx.cparams.warmup = false;
        discovering = true;
        new_epoch();
        ctx.sched_need_reserve = true;
        ctx.sched_reserve();
    }
    if (layers.empty()) {
        error = "the model has no MoE layers";
        return LLAMA_MOE_NO_MOE_LAYERS;
    }

    // rows
    rows.assign(ctx.model.hparams.n_layer_all, nullptr);
    for (auto & l : layers) {
        const int il = l->block.il;
        if (il >= 0 && il < (int) ctx.model.hparams.n_layer_all && !rows[il]) {
            rows[il] = l.get();
        } else {
            rows.push_back(l.get());
        }
    }
    int max_expert = 0;
    int max_used   = 0;
    std::vector<ggml_backend_dev_t> devices(rows.size(), nullptr);
    const bool has_host_buft = ggml_backend_dev_host_buffer_type(dev) != nullptr;
    for (size_t row = 0; row < rows.size(); row++) {
        if (!rows[row]) {
            continue;
        }
        moe_layer & l = *rows[row];
        moe_block & b = l.block;
        b.row        = (int) row;
        max_expert   = std::max(max_expert, b.n_expert);
        max_used     = std::max(max_used, b.n_used);
        devices[row] = ctx.model.dev_layer(std::max(b.il, 0));
        l.whole_fits = devices[row] == dev;
        l.packed     = devices[row] && ggml_backend_dev_type(devices[row]) != GGML_BACKEND_DEVICE_TYPE_CPU;
        const int x_cols = b.n_embd + (l.packed ? 2*b.n_used : 0);
        if (b.hybrid() && !device->supports(b, x_cols, b.fallback)) {
            b.fallback = "the device cannot compute the experts: " + b.fallback;
        }
        if (b.hybrid()) {
            l.pinned  = has_host_buft && host_pinned(b, device->host_buft);
            cold->choose_kernels(b);
            cold->reserve(b, params.max_batch_tokens);
            l.kernels = std::string(b.gate_kernel.name) + ", " + b.down_kernel.name;
            l.slots.slot_of.assign(b.n_expert, -1);
        } else {
            LLAMA_LOG_WARN("moe: layer %d takes llama.cpp's own path: %s\n", b.il, b.fallback.c_str());
        }
        l.fallback_now = b.fallback;
    }
    count_of.resize(max_expert);
    next_of.resize(max_expert);
    hot.reserve((size_t) params.max_batch_tokens*max_used);

    // a reserve rounds the ubatch up to a multiple of the sequences
    const int n_seqs   = (int) ctx.cparams.n_seq_max;
    const int n_ubatch = (std::max((int) ctx.cparams.n_ubatch, n_seqs) + n_seqs - 1)/n_seqs*n_seqs;
    if (!log.init((int) rows.size(), max_used, max_expert, ctx.cparams.n_batch, n_ubatch, device->host_buft, devices, error)) {
        return LLAMA_MOE_NO_DEVICE_MEMORY;
    }
    residency = std::make_unique<moe_residency>(dev);
    if (!residency->init(error)) {
        return LLAMA_MOE_NO_DEVICE;
    }
    const int32_t status = set_execution(params.execution, error);
    if (status != LLAMA_MOE_OK) {
        return status;
    }
    new_epoch();
    ctx.sched_need_reserve = true;
    ctx.sched_reserve();
    return LLAMA_MOE_OK;
}

//
// which execution
//

// The portable execution takes device memory: not before a layer needs it.
bool llama_moe_state::reserve_lane(std::string & error) {
    for (auto & l : layers) {
        const int x_cols = l->block.n_embd + (l->packed ? 2*l->block.n_used : 0);
        if (!lane_ready && l->block.hybrid() && !device->reserve(l->block, x_cols, error)) {
            return false;
        }
    }
    lane_ready = true;
    return true;
}

int32_t llama_moe_state::set_execution(int32_t execution, std::string & error) {
    const bool cpu  = ggml_backend_dev_type(device->dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
    const bool want = execution == LLAMA_MOE_IN_STREAM || (execution == LLAMA_MOE_AUTO && !cpu);
    if (!want && !reserve_lane(error)) {
        return LLAMA_MOE_NO_DEVICE_MEMORY; // and nothing has changed
    }
    if (want && !stream) {
        auto s = std::make_unique<moe_stream>(*this, device->dev);
        int n = 0;
        int n_hybrid = 0;
        for (auto & l : layers) {
            l->stream_reason.clear();
            n_hybrid += l->block.hybrid();
            if (l->block.hybrid() && s->supports(*l, ctx.model.dev_layer(std::max(l->block.il, 0)), l->stream_reason)) {
                n++;
            } else if (l->block.hybrid()) {
                LLAMA_LOG_INFO("moe: layer %d is not computed in-stream: %s\n", l->block.il, l->stream_reason.c_str());
            }
        }
        if (n > 0 && !s->init(error)) {
            for (auto & l : layers) {
                l->stream_reason = error;
            }
            if (execution == LLAMA_MOE_IN_STREAM) {
                return LLAMA_MOE_NO_DEVICE_MEMORY;
            }
            LLAMA_LOG_WARN("moe: no layer is computed in-stream: %s\n", error.c_str());
        } else if (n > 0) {
            stream = std::move(s);
        } else if (execution == LLAMA_MOE_IN_STREAM && n_hybrid > 0) {
            const auto first = std::find_if(layers.begin(), layers.end(), [](const auto & l) { return l->block.hybrid(); });
            error = "no layer can be computed in-stream: " + (*first)->stream_reason;
            return LLAMA_MOE_UNSUPPORTED;
        }
    }
    if (!want) {
        for (auto & l : layers) {
            l->stream_reason = execution == LLAMA_MOE_PORTABLE ? "the portable execution was asked for" : "the CPU only emulates it";
        }
        stream.reset();
    }
    bool lane = params.max_batch_tokens > moe_stream::MAX_TOKENS;
    for (auto & l : layers) {
        lane = lane || (l->block.hybrid() && (!stream || !l->stream_reason.empty()));
    }
    if (lane && !reserve_lane(error)) {
        return LLAMA_MOE_NO_DEVICE_MEMORY;
    }
    params.execution = execution;
    stream_on = stream != nullptr;
    open_prompt_lane();
    changed_graphs();
    return LLAMA_MOE_OK;
}

// No memory for it, or layers that it does not cover, cost speed only.
void llama_moe_state::open_prompt_lane() {
    if (!stream) {
        prompt.reset();
    }
    if (!stream || prompt || !params.prompt_lane || (int) ctx.cparams.n_ubatch <= params.max_batch_tokens) {
        return;
    }
    auto lane = std::make_unique<moe_prompt>(*this, device->dev);
    bool any = false;
    for (auto & l : layers) {
        l->prompt_reason.clear();
        if (lane->supports(*l, l->prompt_reason)) {
            any = true;
        } else if (l->block.hybrid() && l->stream_reason.empty()) { // else it has been said
            LLAMA_LOG_INFO("moe: prompts take llama.cpp's own path in layer %d: %s\n", l->block.il, l->prompt_reason.c_str());
        }
    }
    std::string error;
    if (any && lane->init((int) ctx.cparams.n_ubatch, params.prompt_share, error)) {
        prompt = std::move(lane);
    } else if (any) {
        LLAMA_LOG_WARN("moe: prompts take llama.cpp's own path, which does not use the slots: %s\n", error.c_str());
    }
}

// from one decode to the next, when the pool has failed or is there again
void llama_moe_state::use_stream(bool on) {
    if (on == stream_on) {
        return;
    }
    std::string error;
    if (!on && !reserve_lane(error)) {
        device_failed = lane_failed = true; // all experts are computed on the CPU
        LLAMA_LOG_ERROR("moe: %s\n", error.c_str());
    }
    if (on && lane_failed) {
        device_failed = lane_failed = false;
    }
    LLAMA_LOG_WARN("moe: %s\n", on ? "the pool's threads are back: layers are computed in-stream again"
                                   : "a thread of the pool hangs: until it comes back, layers take the portable execution");
    stream_on = on;
    changed_graphs();
}

ggml_backend_t llama_moe_state::backend_of(ggml_backend_dev_t dev) const {
    for (ggml_backend_t b : ctx.backend_ptrs) {
        if (ggml_backend_get_device(b) == dev) {
            return b;
        }
    }
    return ctx.backend_cpu;
}

int llama_moe_state::n_threads_for(int n_tokens) const {
    return n_tokens > 1 ? ctx.cparams.n_threads_batch : ctx.cparams.n_threads;
}

int llama_moe_state::n_layer() const {
    return (int) ctx.model.hparams.n_layer();
}

moe_router llama_moe_state::router_of(const moe_block & block) const {
    if (block.row != block.il) {
        return {};
    }
    const llama_layer & l = ctx.model.layers[block.il];
    return { l.ffn_gate_inp, l.ffn_gate_inp_b ? l.ffn_gate_inp_b : l.ffn_exp_probs_b, !l.ffn_gate_inp_b };
}

bool llama_moe_state::is_second_block(const moe_block & block) const {
    return block.row >= (int) ctx.model.hparams.n_layer_all;
}

//
// hooks of the context
//

void llama_moe_state::begin_decode() {
    failure.clear();
    if (in_flight) { // nobody waited for the last decode: its ids may still be on their way into the log
        llama_synchronize(&ctx);
        // if it failed, this one would build on what it has left: end_ubatch ends it
    }
    restore_threads();
    if (stream) {
        use_stream(stream->ready());
    }
    graphs.restore(); // memory updates work on the context's own graph
    if (!graphs_only) {
        log.begin_decode();
    }
}

// after a decode in-stream, whatever ended it
void llama_moe_state::restore_threads() {
    if (threads_set) {
        ctx.cparams.n_threads       = n_threads;
        ctx.cparams.n_threads_batch = n_threads_batch;
        threads_set = false;
    }
}

void llama_moe_state::begin_ubatch(const llama_ubatch & ubatch) {
    in_flight = true;
    restore_threads();
    n_ubatches++;
    reused_before = ctx.n_reused;
    if (params.cache_graphs && !ctx.cparams.warmup) {
        graphs.select((int) ubatch.n_tokens);
    }
    if (graphs_only) {
        return;
    }
    log.begin_ubatch((int) ubatch.n_tokens, ubatch.output);

    bool staged = false;
    for (const auto & l : layers) {
        staged = staged || may_be_staged(*l, (int) ubatch.n_tokens);
    }
    epoch = staged ? next_epoch() : lasting_epoch;
    if (staged) {
        prompt->begin_ubatch();
    }

    bool in_stream = false;
    for (const auto & l : layers) {
        in_stream = in_stream || runs_in_stream(*l, (int) ubatch.n_tokens);
    }
    if (stream && !in_stream) {
        stream->settle(); // ubatches before it may have been narrower, with several sequences
    }
    if (in_stream && !ctx.cparams.warmup) {
        stream->begin_ubatch((int) ubatch.n_tokens);
        if (cpu_idles((int) ubatch.n_tokens)) { // ggml's CPU threads would spin on the pool's cores after their few microseconds of work
            n_threads       = ctx.cparams.n_threads;
            n_threads_batch = ctx.cparams.n_threads_batch;
            ctx.cparams.n_threads = ctx.cparams.n_threads_batch = 1;
            threads_set = true;
        }
    }
}

// of the model's weights, but for embeddings, which are looked up
bool llama_moe_state::only_experts_on_host() const {
    if (only_experts < 0) {
        only_experts = 1;
        for (const auto & it : ctx.model.tensors_by_name) {
            const std::string & name = it.first;
            const bool looked_up = name.find("token_embd") != std::string::npos || name.find("position_embd") == 0 || name.find("token_types") == 0;
            const bool expert    = name.find("_exps") != std::string::npos || name.find("_chexps") != std::string::npos;
            if (!looked_up && !expert && it.second->buffer && ggml_backend_buffer_is_host(it.second->buffer)) {
                only_experts = 0;
            }
        }
    }
    return only_experts == 1;
}

// is all that the CPU has to do in the graph of this width the lookup of the tokens' embeddings?
bool llama_moe_state::cpu_idles(int n_tokens) const {
    ggml_backend_dev_t output = ctx.model.dev_output();
    if (!ctx.cparams.offload_kqv || !output || ggml_backend_dev_type(output) == GGML_BACKEND_DEVICE_TYPE_CPU || !only_experts_on_host()) {
        return false;
    }
    for (int il = 0; il < (int) ctx.model.hparams.n_layer_all; il++) {
        ggml_backend_dev_t dev = ctx.model.dev_layer(il);
        if (!dev || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
            return false;
        }
    }
    for (const auto & l : layers) {
        const ggml_tensor * down = l->block.host[MOE_DOWN];
        if (!runs_in_stream(*l, n_tokens) && !runs_whole(*l) && down && down->buffer && ggml_backend_buffer_is_host(down->buffer)) {
            return false;
        }
    }
    return true;
}

bool llama_moe_state::end_ubatch() {
    n_reused += ctx.n_reused - reused_before; // not the counter itself: llama_perf_context_reset zeroes it
    restore_threads();
    if (graphs_only) {
        return true;
    }
    const int n_tokens = log.n_tokens();
    std::vector<bool> on_device(rows.size(), false);
    std::vector<int>  in_stream;
    for (size_t row = 0; row < rows.size(); row++) {
        if (rows[row] && runs_in_stream(*rows[row], n_tokens)) {
            on_device[row] = true;
            if (!is_second_block(rows[row]->block)) {
                in_stream.push_back((int) row);
            }
        } else {
            on_device[row] = rows[row] && !runs_hybrid(*rows[row], n_tokens);
        }
    }
    if (stream) {
        stream->launched(in_stream);
    }
    if (!ctx.cparams.warmup) { // warm-up graphs have no hook
        log.end_ubatch(on_device, cropped_rows(), ctx.n_outputs, ctx.backend_ptrs, callback != nullptr);
    }
    return failure.empty();
}

void llama_moe_state::before_synchronize() {
    if (in_flight && stream_on) {
        stream->sleep_through();
    }
}

void llama_moe_state::on_synchronize() {
    if (!in_flight) {
        return;
    }
    in_flight = false;
    restore_threads();
    if (graphs_only) {
        return;
    }
    if (prompt) {
        prompt->settle();
    }
    if (stream && !stream->end_decode(failure)) {
        fail(failure);
        poison_outputs();
    }
    count_pairs();
    std::vector<int> n_used(rows.size(), 0);
    for (size_t row = 0; row < rows.size(); row++) {
        n_used[row] = rows[row] ? rows[row]->block.n_used : 0;
    }
    log.fold(n_used, cropped_rows(), callback, callback_data);
    if (stream) {
        stream->adopt();
    }
}

// nobody shall take what a failed decode has left for logits
void llama_moe_state::poison_outputs() {
    if (ctx.logits.data) {
        std::fill(ctx.logits.data, ctx.logits.data + std::min(ctx.logits.size, (size_t) ctx.n_outputs*ctx.model.vocab.n_tokens()), NAN);
    }
    for (auto * view : { &ctx.embd, &ctx.embd_nextn, &ctx.sampling.logits, &ctx.sampling.probs }) {
        if (view->data) {
            std::fill(view->data, view->data + view->size, NAN);
        }
    }
    for (auto & it : ctx.embd_seq) {
        std::fill(it.second.begin(), it.second.end(), NAN);
    }
    if (ctx.sampling.sampled.data) {
        std::fill(ctx.sampling.sampled.data, ctx.sampling.sampled.data + ctx.sampling.sampled.size, LLAMA_TOKEN_NULL);
    }
}

// perf of the layers that ran in-stream, or whole on the device: pairs from the log, times from the device's clock (of the last ubatch)
void llama_moe_state::count_pairs() {
    std::vector<bool> seen(log.n_expert), came(log.n_expert), left(log.n_expert);
    for (moe_layer * l : rows) {
        const bool in_stream = l && stream_on && l->block.hybrid() && l->stream_reason.empty() && !runs_whole(*l);
        if (!l || !(in_stream || runs_whole(*l))) {
            continue;
        }
        const int row = l->block.row;
        if (in_stream) {
            stream->changes(*l, came, left);
        }
        bool ran = false;
        for (int u = 0; ; u++) {
            int n_tokens = 0;
            const int32_t * ids = log.choices(u, n_tokens);
            if (!ids) {
                break;
            }
            if (!runs_in_stream(*l, n_tokens) && !runs_whole(*l)) {
                continue;
            }
            ids += (size_t) row*n_tokens*log.n_used;
            llama_moe_perf_data & perf = l->perf;
            std::fill(seen.begin(), seen.end(), false);
            ran = ran || ids[0] >= 0; // else it was a warm-up, or nobody asked for an output of a cropped layer
            perf.n_calls += ids[0] >= 0;
            for (int t = 0; t < n_tokens; t++) {
                perf.n_tokens += ids[t*log.n_used] >= 0;
                for (int k = 0; k < l->block.n_used; k++) {
                    const int32_t e = ids[t*log.n_used + k];
                    if (e < 0 || e >= l->block.n_expert) {
                        continue;
                    }
                    const bool hot = l->slots.slot_of[e] >= 0 && !(in_stream && left[e]);
                    perf.n_streamed_pairs += in_stream && !hot && came[e];
                    (hot ? perf.n_hot_pairs : perf.n_cold_pairs)++;
                    if (!seen[e]) {
                        seen[e] = true;
                        (hot ? perf.n_hot_experts : perf.n_cold_experts)++;
                    }
                }
            }
        }
        if (params.perf && in_stream && ran) { // else the clock tells of another decode
            stream->add_times(*l);
        }
    }
}

std::vector<bool> llama_moe_state::cropped_rows() const {
    std::vector<bool> cropped(rows.size(), false);
    for (size_t row = 0; row < rows.size(); row++) {
        cropped[row] = rows[row] && rows[row]->cropped;
    }
    return cropped;
}

//
// hook of build_moe_ffn
//

bool llama_moe_state::runs_hybrid(const moe_layer & l, int n_tokens) const {
    return l.block.hybrid() && !l.lora && !runs_whole(l) && n_tokens <= params.max_batch_tokens;
}

bool llama_moe_state::runs_whole(const moe_layer & l) const {
    return l.whole && !l.lora && !device_failed; // an adapter is found by the model's own tensors
}

bool llama_moe_state::runs_in_stream(const moe_layer & l, int n_tokens) const {
    return stream_on && l.stream_reason.empty() && runs_hybrid(l, n_tokens) && n_tokens <= moe_stream::MAX_TOKENS;
}

bool llama_moe_state::runs_staged(const moe_layer & l, int n_tokens) const {
    return may_be_staged(l, n_tokens) && !l.lora;
}

// whatever adapters a graph that is yet to be built will have
bool llama_moe_state::may_be_staged(const moe_layer & l, int n_tokens) const {
    return prompt && stream_on && l.prompt_reason.empty() && !l.whole && n_tokens > params.max_batch_tokens;
}

static bool has_lora(const llm_graph_context & g, const llama_moe_ffn & f) {
    for (const auto & lora : *g.loras) {
        for (ggml_tensor * t : f.tensors) {
            if (t && lora.first->get_weight(t)) {
                return true;
            }
        }
    }
    return false;
}

// cur, ids and weights in one tensor: one copy from the device instead of three, each of which would wait for it
static ggml_tensor * pack_inputs(ggml_context * ctx, ggml_tensor * cur, ggml_tensor * ids, ggml_tensor * weights) {
    ggml_tensor * i = ggml_cast(ctx, ids, GGML_TYPE_F32); // exact: ids are far below 2^24
    ggml_tensor * w = ggml_reshape_2d(ctx, weights, weights->ne[1], weights->ne[2]);
    return ggml_concat(ctx, cur, ggml_concat(ctx, i, w, 0), 0);
}

ggml_tensor * llama_moe_state::build_op(const llm_graph_context & g, moe_layer & l, const llama_moe_ffn & f) {
    ggml_tensor * args[3] = { f.cur, f.ids, f.weights };
    int n_args = 3;
    if (!ggml_is_contiguous(f.cur)) {
        args[0] = ggml_cont(g.ctx0, f.cur);
    }
    if (l.packed) {
        args[0] = pack_inputs(g.ctx0, args[0], f.ids, f.weights);
        n_args  = 1;
    }
    ggml_tensor * out = ggml_custom_4d(g.ctx0, GGML_TYPE_F32, f.cur->ne[0], f.cur->ne[1], 1, 1, args, n_args, moe_op, GGML_N_TASKS_MAX, &l);
    ggml_backend_sched_set_tensor_backend(g.sched, out, g.backend_cpu);
    return out;
}

ggml_tensor * llama_moe_state::build(const llm_graph_context & g, llama_moe_ffn & f) {
    if (discovering) {
        discover(g, f);
        return nullptr;
    }
    const auto it = by_down.find(f.tensors[MOE_DOWN]);
    if (it == by_down.end()) {
        return nullptr; // not part of the graphs that attach saw
    }
    moe_layer & l = *it->second;
    const int64_t n_tokens = f.cur->ne[1];
    if (g.n_outputs != g.n_tokens) { // else this graph cannot tell
        l.cropped = n_tokens != g.n_tokens;
    }
    if ((int) f.ids->ne[0] != l.block.n_used || n_tokens == 0) {
        return nullptr;
    }
    const bool lora = has_lora(g, f);
    if (lora != l.lora) {
        l.lora = lora;
        l.fallback_now = lora ? "a LoRA adapter changes the experts" : l.block.fallback;
        if (lora) {
            LLAMA_LOG_WARN("moe: layer %d takes llama.cpp's own path: %s\n", l.block.il, l.fallback_now.c_str());
        }
    }
    // by the width of the ubatch, not of a cropped layer: end_ubatch must come to the same answer
    if (runs_in_stream(l, (int) g.n_tokens)) {
        return stream->build(g, l, f);
    }
    if (runs_hybrid(l, (int) g.n_tokens)) {
        return build_op(g, l, f);
    }
    if (runs_whole(l)) {
        f.tensors = l.slots.tensors;
    }
    ggml_build_forward_expand(g.gf, log.copy_ids(g.ctx0, l.block.row, f.ids, (int) g.n_tokens));
    if (callback) {
        ggml_build_forward_expand(g.gf, log.copy_weights(g.ctx0, l.block.row, f.weights, (int) g.n_tokens));
    }
    if (runs_staged(l, (int) g.n_tokens)) {
        return prompt->build(g, l, f);
    }
    return nullptr;
}

//
// API
//

int32_t llama_moe_state::set_slots(const int32_t * n_slots, std::string & error) {
    for (size_t row = 0; row < rows.size(); row++) {
        const int n = n_slots[row];
        const std::string at = "row " + std::to_string(row) + ": ";
        if (n < 0) {
            error = at + std::to_string(n) + " slots were asked for";
            return LLAMA_MOE_INVALID_ARGUMENT;
        }
        if (n > 0 && !rows[row]) {
            error = at + "it has no experts, but " + std::to_string(n) + " slots were asked for";
            return LLAMA_MOE_INVALID_ARGUMENT;
        }
        if (n > 0 && !rows[row]->block.hybrid()) {
            error = at + rows[row]->block.fallback;
            return LLAMA_MOE_UNSUPPORTED;
        }
        if (rows[row] && n > rows[row]->block.n_expert) {
            error = at + std::to_string(n) + " slots were asked for, but there are only " + std::to_string(rows[row]->block.n_expert) + " experts";
            return LLAMA_MOE_INVALID_ARGUMENT;
        }
    }
    // with a slot for every expert prompts find all in the slots
    bool all = true;
    for (const auto & l : layers) {
        all = all && (!l->block.hybrid() || n_slots[l->block.row] == l->block.n_expert);
    }
    if (all && prompt) {
        prompt.reset();
        prompt_set_aside = true;
        changed_graphs();
    }
    // what shrinks gives its memory first
    int32_t status  = LLAMA_MOE_OK;
    bool    changed = false;
    for (bool shrink : { true, false }) {
        for (size_t row = 0; row < rows.size(); row++) {
            moe_layer * l = rows[row];
            if (!l || !l->block.hybrid() || (n_slots[row] <= (int) l->slots.slots.size()) != shrink || n_slots[row] == (int) l->slots.slots.size()) {
                continue;
            }
            l->graphs.clear(); // they hold the old slots' addresses
            if (!residency->resize(l->block, l->slots, n_slots[row], error)) {
                status = LLAMA_MOE_NO_DEVICE_MEMORY;
            }
            changed = true;
        }
    }
    if (changed && stream) { // so do the graphs of the context
        stream->slots_changed();
        changed_graphs();
    }
    if (changed) {
        placement_changed();
    }
    if (!all && prompt_set_aside) {
        prompt_set_aside = false;
        open_prompt_lane();
    }
    return status;
}

void llama_moe_state::placement_changed() {
    if (stream) {
        stream->map_changed();
    }
    bool changed = false;
    for (auto & l : layers) {
        bool whole = params.whole_layers && l->whole_fits && l->block.hybrid() && (int) l->slots.slots.size() == l->block.n_expert;
        for (int e = 0; whole && e < l->block.n_expert; e++) {
            whole = l->slots.slot_of[e] == e;
        }
        changed  = changed || whole != l->whole;
        l->whole = whole;
    }
    if (changed) {
        changed_graphs();
    }
}

void llama_moe_state::set_callback(llama_moe_router_callback cb, void * user_data) {
    if ((cb != nullptr) != (callback != nullptr)) {
        changed_graphs(); // weights are copied only for a callback
    }
    callback      = cb;
    callback_data = user_data;
}

int64_t llama_moe_state::device_bytes() const {
    int64_t n = (int64_t) (device->device_bytes() + graphs.device_bytes(device->dev) + (stream ? stream->device_bytes() : 0) + (prompt ? prompt->device_bytes() : 0));
    for (const auto & l : layers) {
        n += l->slots.buf ? (int64_t) ggml_backend_buffer_get_size(l->slots.buf.get()) : 0;
    }
    return n;
}
