// The portable execution of a hybrid layer: a CPU op inside upstream's scheduler. Thread 0 splits the pairs and starts the device
// lane, all threads compute the cold pairs meanwhile, then the device's sum is added.

#include "moe-state.h"

#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cstring>

// where the op finds what the router chose: three tensors, or one packed [n_embd + 2*n_used, n_tokens] (see pack_inputs)
struct moe_op_inputs {
    const char * x;
    size_t       x_stride;
    const char * ids;
    size_t       ids_stride_t, ids_stride_k;
    const char * weights;
    size_t       weights_stride_t, weights_stride_k;
    bool         packed;
    const ggml_tensor * x_tensor;

    int32_t id(int t, int k) const {
        const char * p = ids + t*ids_stride_t + k*ids_stride_k;
        return packed ? (int32_t) *(const float *) p : *(const int32_t *) p;
    }
    float weight(int t, int k) const {
        return *(const float *) (weights + t*weights_stride_t + k*weights_stride_k);
    }
};

static moe_op_inputs inputs_of(const ggml_tensor * dst, const moe_block & block) {
    const ggml_tensor * x = dst->src[0];
    const char * data = (const char *) x->data;
    if (!dst->src[1]) {
        const char * ids = data + block.n_embd*sizeof(float);
        const char * w   = ids  + block.n_used*sizeof(float);
        return { data, x->nb[1], ids, x->nb[1], sizeof(float), w, x->nb[1], sizeof(float), true, x };
    }
    const ggml_tensor * ids = dst->src[1];
    const ggml_tensor * w   = dst->src[2];
    return { data, x->nb[1], (const char *) ids->data, ids->nb[1], ids->nb[0], (const char *) w->data, w->nb[2], w->nb[1], false, x };
}

static double now_us() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static bool is_pinned(const ggml_tensor * t, const moe_device_lane & device) {
    ggml_backend_buffer_t buf = t->view_src ? t->view_src->buffer : t->buffer;
    return buf && ggml_backend_buffer_get_type(buf) == device.host_buft;
}

namespace {

// one thread's view of one call
struct moe_op_run {
    moe_layer & l;
    llama_moe_state & st;
    ggml_tensor * dst; // F32 [n_embd, n_tokens]
    moe_op_inputs in;
    int n_tokens;
    int ith;
    int n_threads;

    void run();
    void split_pairs();
    void add_hot(const float * sum, bool add);
    void finish(bool timed, double t0, double t1, double t2, double t3, double wait);
};

void moe_op_run::split_pairs() {
    const moe_block & block = l.block;
    int32_t * log_ids     = st.log.ids(block.row);
    float   * log_weights = st.log.weights(block.row);
    const std::vector<int32_t> & slot_of = l.slots.slot_of;

    st.hot.clear();
    st.cold->begin(block);
    std::fill(st.count_of.begin(), st.count_of.begin() + block.n_expert, 0);
    int64_t n_hot_experts = 0;
    for (int t = 0; t < n_tokens; t++) {
        for (int k = 0; k < block.n_used; k++) {
            int32_t e = in.id(t, k);
            if (e < 0 || e >= block.n_expert) {
                st.fail("row " + std::to_string(block.row) + ": the router chose expert " + std::to_string(e) + " of " + std::to_string(block.n_expert));
                e = 0;
            }
            const float   w    = in.weight(t, k);
            const int32_t slot = st.device_failed ? -1 : slot_of[e];
            if (st.count_of[e]++ == 0 && slot >= 0) {
                n_hot_experts++;
            }
            if (slot >= 0) {
                st.hot.push_back({ t, k, slot, w*block.output_scale(e) });
            }
            if (log_ids) {
                log_ids    [t*st.log.n_used + k] = e;
                log_weights[t*st.log.n_used + k] = w;
            }
        }
    }
    // cold pairs, grouped by expert
    auto & pairs   = st.cold->pairs;
    auto & experts = st.cold->experts;
    int32_t n = 0;
    for (int e = 0; e < block.n_expert; e++) {
        if (st.count_of[e] && (st.device_failed || slot_of[e] < 0)) {
            experts.push_back({ e, n, st.count_of[e] });
            st.next_of[e] = n;
            n += st.count_of[e];
        }
    }
    pairs.resize(n);
    for (int t = 0; n > 0 && t < n_tokens; t++) {
        for (int k = 0; k < block.n_used; k++) {
            const int32_t e = std::clamp(in.id(t, k), 0, block.n_expert - 1);
            if (st.device_failed || slot_of[e] < 0) {
                pairs[st.next_of[e]++] = { t, in.weight(t, k)*block.output_scale(e) };
            }
        }
    }
    l.perf.n_calls++;
    l.perf.n_tokens       += n_tokens;
    l.perf.n_hot_pairs    += (int64_t) st.hot.size();
    l.perf.n_cold_pairs   += n;
    l.perf.n_hot_experts  += n_hot_experts;
    l.perf.n_cold_experts += (int64_t) experts.size();
}

// dst[t] (+)= sum of the hot pairs, rows shared out over the threads
void moe_op_run::add_hot(const float * sum, bool add) {
    for (int t = ith; t < n_tokens; t += n_threads) {
        float * d = (float *) ((char *) dst->data + t*dst->nb[1]);
        const float * s = sum + (size_t) t*l.block.n_embd;
        if (add) {
            for (int i = 0; i < l.block.n_embd; i++) {
                d[i] += s[i];
            }
        } else {
            memcpy(d, s, sizeof(float)*l.block.n_embd);
        }
    }
}

void moe_op_run::run() {
    const bool timed = st.params.perf && ith == 0;
    const double t0 = timed ? now_us() : 0;
    if (ith == 0) {
        split_pairs();
    }
    if (!l.block.weight_before) {
        st.cold->quantize_tokens(l.block, in.x, in.x_stride, n_tokens, ith, n_threads);
    }
    st.barrier.wait(n_threads);

    const bool has_hot  = !st.hot.empty();
    const bool has_cold = !st.cold->pairs.empty();
    const double t1 = timed ? now_us() : 0;
    if (ith == 0 && has_hot && !st.device->launch(l.block, l.slots.tensors, l.graphs, st.hot, in.x, in.x_stride, n_tokens, is_pinned(in.x_tensor, *st.device))) {
        st.device_failed = true;
        st.fail(std::string("the device lane on ") + ggml_backend_dev_name(st.device->dev) + " failed; from now on all experts are computed on the CPU");
    }
    const double t2 = timed ? now_us() : 0;
    if (has_cold) {
        st.cold->run(l.block, in.x, in.x_stride, n_tokens, (char *) dst->data, dst->nb[1], ith, n_threads, st.barrier);
    }
    if (!has_hot) {
        finish(timed, t0, t1, t2, timed ? now_us() : 0, 0);
        return;
    }
    if (has_cold || n_tokens > 1) {
        st.barrier.wait(n_threads);
    } else if (ith > 0) {
        return;
    }
    const double t3 = timed ? now_us() : 0;
    if (ith == 0) {
        st.hot_sum = st.device->wait();
    }
    const double t4 = timed ? now_us() : 0;
    if (n_tokens > 1) {
        st.barrier.wait(n_threads);
    } else if (ith > 0) {
        return;
    }
    add_hot(st.hot_sum, has_cold);
    finish(timed, t0, t1, t2, t3, t4 - t3);
}

void moe_op_run::finish(bool timed, double t0, double t1, double t2, double t3, double wait) {
    if (timed) {
        l.perf.us_plan   += t1 - t0;
        l.perf.us_launch += t2 - t1;
        l.perf.us_cold   += t3 - t2;
        l.perf.us_wait   += wait;
        l.perf.us_total  += now_us() - t0;
    }
}

} // namespace

void moe_op(ggml_tensor * dst, int ith, int n_threads, void * user_data) {
    moe_layer & l = *(moe_layer *) user_data;
    moe_op_run { l, *l.state, dst, inputs_of(dst, l.block), (int) dst->ne[1], ith, n_threads }.run();
}
