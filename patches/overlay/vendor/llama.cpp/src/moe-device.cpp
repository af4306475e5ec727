#include "moe-device.h"

#include "ggml.h"

#include <algorithm>
#include <cstring>

static constexpr size_t REGION_ALIGN = 128;
static constexpr int    MIN_ROWS     = 8;

void moe_set_one_thread(ggml_backend_t backend) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    auto fn = reg ? (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads") : nullptr;
    if (fn) {
        fn(backend, 1);
    }
}

ggml_tensor * moe_activation_op(ggml_context * ctx, moe_activation act, ggml_tensor * gate, ggml_tensor * up) {
    switch (act) {
        case MOE_ACT_SWIGLU:     return ggml_swiglu_split(ctx, gate, up);
        case MOE_ACT_GEGLU:      return ggml_geglu_split (ctx, gate, up);
        case MOE_ACT_REGLU:      return ggml_reglu_split (ctx, gate, up);
        case MOE_ACT_SWIGLU_OAI: return ggml_swiglu_oai  (ctx, gate, up, MOE_OAI_ALPHA, MOE_OAI_LIMIT);
    }
    return nullptr;
}

moe_device_lane::moe_device_lane(ggml_backend_dev_t dev, int max_tokens) : dev(dev), max_tokens(max_tokens) {}

bool moe_device_lane::init(std::string & error) {
    backend.reset(ggml_backend_dev_init(dev, nullptr));
    if (!backend) {
        error = std::string("the device ") + ggml_backend_dev_name(dev) + " could not be opened";
        return false;
    }
    moe_set_one_thread(backend.get());
    buft      = ggml_backend_dev_buffer_type(dev);
    host_buft = ggml_backend_dev_host_buffer_type(dev);
    if (!host_buft) {
        host_buft = ggml_backend_dev_buffer_type(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    }
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    const std::string name = reg ? ggml_backend_reg_name(reg) : "";
    is_cuda = name == "CUDA" || name == "ROCm" || name == "MUSA";
    galloc.reset(ggml_gallocr_new(buft));
    return true;
}

// Shape of the ids. [n_rows, 1] (one "token" with n_rows experts) takes CUDA's vector kernels, where equal ids are legal and the
// number of rows is not limited; only quantised types have them. [1, n_rows] (each row a token with one expert) is legal
// everywhere: batched kernels need the ids of one token to differ.
bool moe_device_lane::per_row_ids(const moe_block & block) const {
    bool quantized = true;
    for (int p : { MOE_GATE, MOE_UP, MOE_DOWN }) {
        quantized = quantized && (!block.host[p] || ggml_is_quantized(block.host[p]->type));
    }
    return !(is_cuda && quantized);
}

int moe_device_lane::round_rows(const moe_block & block, int n_pairs) const {
    int n = MIN_ROWS;
    while (n < n_pairs) {
        n *= 2;
    }
    return std::min(n, std::max(MIN_ROWS, max_tokens*block.n_used));
}

// 1, 2, 4, 8, 12, 16, 24, 32, 48, ...
int moe_device_lane::round_tokens(int n_tokens) const {
    int n = 1;
    while (n < n_tokens) {
        if (n >= 8 && n + n/2 >= n_tokens) {
            n += n/2;
            break;
        }
        n *= 2;
    }
    return std::min(n, max_tokens);
}

std::unique_ptr<moe_device_graph> moe_device_lane::build(
        const moe_block & block, const moe_tensors & slots, int n_rows, int n_tokens, int x_cols) const {
    const int n_embd = block.n_embd;
    const int n_used = block.n_used;

    auto g = std::make_unique<moe_device_graph>();
    const int max_nodes = 40 + 2*n_used; // the sum takes a view and an addition per expert used
    g->ctx.reset(ggml_init({ ggml_tensor_overhead()*max_nodes + ggml_graph_overhead_custom(max_nodes, false), nullptr, true }));
    ggml_context * ctx = g->ctx.get();
    g->n_rows   = n_rows;
    g->n_tokens = n_tokens;

    // inputs, placed one after the other by place_inputs
    ggml_tensor * rows = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_rows);
    ggml_tensor * ids  = per_row_ids(block) ? ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, n_rows) : ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_rows, 1);
    ggml_tensor * pick = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_used*n_tokens);
    ggml_tensor * w    = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 1, n_used, n_tokens);
    ggml_tensor * wrow = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 1, n_rows);
    ggml_tensor * cur  = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, x_cols, n_tokens);

    auto as_rows = [&](ggml_tensor * t) { // [n, n_rows] in the shape that goes with the ids
        return per_row_ids(block) ? ggml_reshape_3d(ctx, t, t->ne[0], 1, n_rows) : ggml_reshape_3d(ctx, t, t->ne[0], n_rows, 1);
    };

    ggml_tensor * x = ggml_view_2d(ctx, cur, n_embd, n_tokens, cur->nb[1], 0);
    if (n_tokens > 1 || per_row_ids(block) || block.weight_before) {
        x = ggml_get_rows(ctx, x, rows); // [n_embd, n_rows]
        if (block.weight_before) {
            x = ggml_mul(ctx, x, wrow);
        }
        x = as_rows(x);
    } else {
        x = ggml_reshape_3d(ctx, x, n_embd, 1, 1); // one token: all its experts share the row
    }

    ggml_tensor * gate;
    ggml_tensor * up;
    if (block.merged) {
        ggml_tensor * gu = ggml_mul_mat_id(ctx, slots[MOE_GATE], x, ids);
        if (slots[MOE_GATE_B]) {
            gu = ggml_add_id(ctx, gu, slots[MOE_GATE_B], ids);
        }
        gate = ggml_view_3d(ctx, gu, block.n_ff, gu->ne[1], gu->ne[2], gu->nb[1], gu->nb[2], 0);
        up   = ggml_view_3d(ctx, gu, block.n_ff, gu->ne[1], gu->ne[2], gu->nb[1], gu->nb[2], block.n_ff*gu->nb[0]);
    } else {
        gate = ggml_mul_mat_id(ctx, slots[MOE_GATE], x, ids);
        if (slots[MOE_GATE_B]) {
            gate = ggml_add_id(ctx, gate, slots[MOE_GATE_B], ids);
        }
        up = ggml_mul_mat_id(ctx, slots[MOE_UP], x, ids);
        if (slots[MOE_UP_B]) {
            up = ggml_add_id(ctx, up, slots[MOE_UP_B], ids);
        }
    }

    ggml_tensor * y = ggml_mul_mat_id(ctx, slots[MOE_DOWN], moe_activation_op(ctx, block.act, gate, up), ids);
    if (slots[MOE_DOWN_B]) {
        y = ggml_add_id(ctx, y, slots[MOE_DOWN_B], ids);
    }

    // the weighted sum in rank order, in the form that upstream's build_moe_ffn gives it (CUDA fuses just this sequence)
    y = ggml_get_rows(ctx, ggml_reshape_2d(ctx, y, n_embd, n_rows), pick);
    y = ggml_mul(ctx, ggml_reshape_3d(ctx, y, n_embd, n_used, n_tokens), w);

    g->gf = ggml_new_graph_custom(ctx, max_nodes, false);
    ggml_build_forward_expand(g->gf, y);
    std::vector<ggml_tensor *> of_k(n_used);
    for (int k = 0; k < n_used; k++) {
        of_k[k] = ggml_view_2d(ctx, y, n_embd, n_tokens, y->nb[2], k*y->nb[1]);
        ggml_build_forward_expand(g->gf, of_k[k]);
    }
    g->out = of_k[0];
    for (int k = 1; k < n_used; k++) {
        g->out = ggml_add(ctx, g->out, of_k[k]);
        ggml_build_forward_expand(g->gf, g->out);
    }
    if (n_used == 1) {
        g->out = ggml_cont(ctx, g->out);
        ggml_build_forward_expand(g->gf, g->out);
    }
    ggml_set_output(g->out);
    return g;
}

// gives the input tensors their place in the region; returns the region's size. Without a buffer it only measures.
size_t moe_device_lane::place_inputs(moe_device_graph & g, ggml_backend_buffer_t buf) const {
    char * base = buf ? (char *) ggml_backend_buffer_get_base(buf) : nullptr;
    size_t off  = 0;
    ggml_tensor * t = ggml_get_first_tensor(g.ctx.get()); // the inputs were created first, in this order
    for (size_t * offset : { &g.off_rows, &g.off_ids, &g.off_pick, &g.off_w, &g.off_wrow, &g.off_x }) {
        *offset = off;
        if (buf) {
            ggml_backend_tensor_alloc(buf, t, base + off);
        }
        off += GGML_PAD(ggml_nbytes(t), REGION_ALIGN);
        t = ggml_get_next_tensor(g.ctx.get(), t);
    }
    if (buf) {
        g.region = ggml_new_tensor_1d(g.ctx.get(), GGML_TYPE_I8, off);
        ggml_backend_tensor_alloc(buf, g.region, base);
    }
    return off;
}

// tensors with the shape of the block's slots but no memory, to ask about a graph
static moe_tensors shapes_of(const moe_block & block, ggml_context * ctx) {
    moe_tensors t = {};
    for (int p = 0; p < MOE_N_PARTS; p++) {
        if (const ggml_tensor * h = block.host[p]) {
            t[p] = p >= MOE_GATE_B ? ggml_new_tensor_2d(ctx, h->type, h->ne[0], block.n_expert)
                                   : ggml_new_tensor_3d(ctx, h->type, h->ne[0], h->ne[1], block.n_expert);
        }
    }
    return t;
}

bool moe_device_lane::supports(const moe_block & block, int x_cols, std::string & error) const {
    ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead()*MOE_N_PARTS, nullptr, true }));
    const moe_tensors slots = shapes_of(block, ctx.get());
    for (int n_tokens : { 1, max_tokens }) {
        auto g = build(block, slots, round_rows(block, n_tokens*block.n_used), n_tokens, x_cols);
        for (int i = 0; i < ggml_graph_n_nodes(g->gf); i++) {
            const ggml_tensor * node = ggml_graph_node(g->gf, i);
            if (!ggml_backend_dev_supports_op(dev, node)) {
                error = std::string(ggml_backend_dev_name(dev)) + " does not support " + ggml_op_desc(node);
                if (node->src[0]) {
                    error += std::string(" of ") + ggml_type_name(node->src[0]->type);
                }
                return false;
            }
        }
    }
    return true;
}

static bool grow(ggml_backend_buffer_ptr & buf, ggml_backend_buffer_type_t buft, size_t size, const char * what, std::string & error) {
    if (buf && ggml_backend_buffer_get_size(buf.get()) >= size) {
        return true;
    }
    buf.reset(ggml_backend_buft_alloc_buffer(buft, size));
    if (!buf) {
        error = std::string("no memory for ") + what + " (" + std::to_string(size) + " bytes of " + ggml_backend_buft_name(buft) + ")";
        return false;
    }
    return true;
}

bool moe_device_lane::reserve(const moe_block & block, int x_cols, std::string & error) {
    ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead()*MOE_N_PARTS, nullptr, true }));
    moe_tensors slots = shapes_of(block, ctx.get());
    for (auto * t : slots) {
        if (t) {
            t->data = (void *) REGION_ALIGN; // "allocated": the allocator must not plan room for the slots
        }
    }
    auto g = build(block, slots, round_rows(block, max_tokens*block.n_used), max_tokens, x_cols);
    in_size  = std::max(in_size, place_inputs(*g, nullptr));
    out_size = std::max(out_size, sizeof(float)*block.n_embd*max_tokens);
    if (!grow(buf_in, buft, in_size, "the device lane's inputs", error) ||
            !grow(buf_stage_in, host_buft, in_size, "the device lane's staging memory", error) ||
            !grow(buf_stage_out, host_buft, out_size, "the device lane's staging memory", error)) {
        return false;
    }
    stage_in  = (char *) ggml_backend_buffer_get_base(buf_stage_in.get());
    stage_out = (char *) ggml_backend_buffer_get_base(buf_stage_out.get());
    place_inputs(*g, buf_in.get());
    if (!ggml_gallocr_reserve(galloc.get(), g->gf)) {
        error = "no memory for the device lane's compute buffer";
        return false;
    }
    generation++;
    return true;
}

moe_device_graph * moe_device_lane::graph(
        const moe_block & block, const moe_tensors & slots, moe_device_graphs & graphs, int n_rows, int n_tokens, int x_cols) {
    auto & g = graphs[(uint32_t) n_rows << 16 | n_tokens];
    if (!g || g->generation != generation) {
        g = build(block, slots, n_rows, n_tokens, x_cols);
        place_inputs(*g, buf_in.get());
        // all graphs share one compute buffer: the lane runs one at a time
        const size_t before = ggml_gallocr_get_buffer_size(galloc.get(), 0);
        if (!ggml_gallocr_alloc_graph(galloc.get(), g->gf)) {
            g.reset();
            return nullptr;
        }
        if (ggml_gallocr_get_buffer_size(galloc.get(), 0) != before) {
            generation++; // it moved: the graphs that were allocated before are stale
        }
        g->generation = generation;
    }
    return g.get();
}

bool moe_device_lane::launch(const moe_block & block, const moe_tensors & slots, moe_device_graphs & graphs,
        const std::vector<moe_hot_pair> & pairs, const char * x, size_t x_stride, int n_tokens, bool x_pinned) {
    const int n_rows = round_rows(block, (int) pairs.size());
    const int x_cols = (int) (x_stride/sizeof(float));
    moe_device_graph * g = graph(block, slots, graphs, n_rows, round_tokens(n_tokens), x_cols);
    if (!g) {
        return false;
    }
    int32_t * rows = (int32_t *) (stage_in + g->off_rows);
    int32_t * ids  = (int32_t *) (stage_in + g->off_ids);
    int32_t * pick = (int32_t *) (stage_in + g->off_pick);
    float   * w    = (float   *) (stage_in + g->off_w);
    float   * wrow = (float   *) (stage_in + g->off_wrow);

    // A cold (token, k) picks some row at weight 0; one of its own token if there is one, so that an infinity stays with its token.
    std::fill(w,    w    + block.n_used*g->n_tokens, 0.0f);
    std::fill(pick, pick + block.n_used*g->n_tokens, 0);
    for (size_t r = 0; r < pairs.size(); r++) {
        for (int k = 0; k < block.n_used; k++) {
            pick[pairs[r].token*block.n_used + k] = (int32_t) r;
        }
    }
    for (size_t r = 0; r < pairs.size(); r++) {
        const moe_hot_pair & p = pairs[r];
        rows[r] = p.token;
        ids [r] = p.slot;
        wrow[r] = p.weight;
        pick[p.token*block.n_used + p.k] = (int32_t) r;
        w   [p.token*block.n_used + p.k] = block.weight_before ? 1.0f : p.weight;
    }
    // padding repeats a published pair: no kernel may read a slot that was not written
    for (int r = (int) pairs.size(); r < n_rows; r++) {
        rows[r] = rows[0];
        ids [r] = ids [0];
        wrow[r] = wrow[0];
    }

    const size_t n_x = n_tokens*x_stride;
    if (x_pinned && n_tokens > 2) { // worth a copy of its own
        ggml_backend_tensor_set_async(backend.get(), g->region, stage_in, 0, g->off_x);
        ggml_backend_tensor_set_async(backend.get(), g->region, x, g->off_x, n_x);
    } else {
        memcpy(stage_in + g->off_x, x, n_x);
        ggml_backend_tensor_set_async(backend.get(), g->region, stage_in, 0, g->off_x + n_x);
    }
    if (ggml_backend_graph_compute_async(backend.get(), g->gf) != GGML_STATUS_SUCCESS) {
        return false;
    }
    ggml_backend_tensor_get_async(backend.get(), g->out, stage_out, 0, sizeof(float)*block.n_embd*n_tokens);
    return true;
}

const float * moe_device_lane::wait() {
    ggml_backend_synchronize(backend.get());
    return (const float *) stage_out;
}

size_t moe_device_lane::device_bytes() const {
    return (buf_in ? ggml_backend_buffer_get_size(buf_in.get()) : 0) + (galloc ? ggml_gallocr_get_buffer_size(galloc.get(), 0) : 0);
}
