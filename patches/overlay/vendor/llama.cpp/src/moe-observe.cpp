#include "moe-observe.h"

#include "ggml.h"

#include <algorithm>

bool moe_router_log::init(int n_rows_, int n_used_, int n_expert_, int n_batch, int n_ubatch, ggml_backend_buffer_type_t host_buft,
        const std::vector<ggml_backend_dev_t> & devices, std::string & error) {
    n_rows   = n_rows_;
    n_used   = n_used_;
    n_expert = n_expert_;
    counts.assign((size_t) n_rows*n_expert, 0);

    capacity = (size_t) n_rows*n_batch*n_used;
    buf.reset(ggml_backend_buft_alloc_buffer(host_buft, capacity*(sizeof(int32_t) + sizeof(float))));
    if (!buf) {
        error = "no host memory for the router log";
        return false;
    }
    host_ids     = (int32_t *) ggml_backend_buffer_get_base(buf.get());
    host_weights = (float *) (host_ids + capacity);

    log_of_row.assign(n_rows, -1);
    for (int row = 0; row < n_rows; row++) {
        if (!devices[row]) {
            continue; // empty row
        }
        auto it = std::find_if(logs.begin(), logs.end(), [&](const device_log & d) { return d.dev == devices[row]; });
        if (it == logs.end()) {
            logs.emplace_back();
            it = logs.end() - 1;
            it->dev = devices[row];
        }
        it->rows.push_back(row);
        log_of_row[row] = (int) (it - logs.begin());
    }
    for (auto & d : logs) {
        const int64_t n = (int64_t) d.rows.size()*n_ubatch*n_used;
        d.ctx.reset(ggml_init({ ggml_tensor_overhead()*2, nullptr, true }));
        d.ids     = ggml_new_tensor_1d(d.ctx.get(), GGML_TYPE_I32, n);
        d.weights = ggml_new_tensor_1d(d.ctx.get(), GGML_TYPE_F32, n);
        d.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(d.ctx.get(), ggml_backend_dev_buffer_type(d.dev)));
        if (!d.buf) {
            error = std::string("no memory on ") + ggml_backend_dev_name(d.dev) + " for the router log";
            return false;
        }
        ggml_backend_buffer_clear(d.buf.get(), 0xff); // id -1: nothing chosen
    }
    return true;
}

moe_router_log::device_log & moe_router_log::log_of(int row) {
    return logs[log_of_row[row]];
}

size_t moe_router_log::device_offset(const device_log & d, int row, int n_tokens) const {
    const size_t i = std::lower_bound(d.rows.begin(), d.rows.end(), row) - d.rows.begin();
    return i*n_tokens*n_used;
}

//
// graph
//

ggml_tensor * moe_router_log::view(ggml_context * ctx, int row, ggml_tensor * log, int64_t k, int64_t n, int n_tokens) {
    const size_t offset = device_offset(log_of(row), row, n_tokens)*ggml_element_size(log);
    return ggml_view_2d(ctx, log, k, n, n_used*ggml_element_size(log), offset);
}

ggml_tensor * moe_router_log::view_ids(ggml_context * ctx, int row, int k, int n, int n_tokens) {
    return view(ctx, row, log_of(row).ids, k, n, n_tokens);
}

ggml_tensor * moe_router_log::view_weights(ggml_context * ctx, int row, int k, int n, int n_tokens) {
    return view(ctx, row, log_of(row).weights, k, n, n_tokens);
}

// src may be a strided view (top-k is one)
ggml_tensor * moe_router_log::copy_ids(ggml_context * ctx, int row, ggml_tensor * ids, int n_tokens) {
    return ggml_cpy(ctx, ids, view(ctx, row, log_of(row).ids, ids->ne[0], ids->ne[1], n_tokens));
}

ggml_tensor * moe_router_log::copy_weights(ggml_context * ctx, int row, ggml_tensor * weights, int n_tokens) { // [1, n_used, n]
    ggml_tensor * w = ggml_view_2d(ctx, weights, weights->ne[1], weights->ne[2], weights->nb[2], 0);
    return ggml_cpy(ctx, w, view(ctx, row, log_of(row).weights, w->ne[0], w->ne[1], n_tokens));
}

//
// decode
//

void moe_router_log::begin_decode() {
    segments.clear();
    has_output.clear();
    n_folded = 0;
    used     = 0;
    full     = false;
    std::fill(counts.begin(), counts.end(), 0);
}

void moe_router_log::begin_ubatch(int n_tokens, const int8_t * outputs) {
    const size_t n = (size_t) n_rows*n_tokens*n_used;
    full = used + n > capacity;
    if (full) {
        return;
    }
    segments.push_back({ n_tokens, n_tokens, used, has_output.size(), false });
    for (int t = 0; t < n_tokens; t++) {
        has_output.push_back(outputs ? outputs[t] : 1);
    }
    std::fill(host_ids + used, host_ids + used + n, -1);
    used += n;
}

int32_t * moe_router_log::ids(int row) {
    return full ? nullptr : host_ids + segments.back().first + (size_t) row*segments.back().n_tokens*n_used;
}

float * moe_router_log::weights(int row) {
    return full ? nullptr : host_weights + segments.back().first + (size_t) row*segments.back().n_tokens*n_used;
}

void moe_router_log::end_ubatch(const std::vector<bool> & on_device, const std::vector<bool> & cropped, int n_outputs,
        const std::vector<ggml_backend_t> & backends, bool weights_too) {
    if (full || segments.empty()) {
        return;
    }
    segments.back().n_outputs = n_outputs;
    segments.back().complete  = true;
    const int n_tokens = segments.back().n_tokens;
    for (auto & d : logs) {
        ggml_backend_t backend = nullptr;
        for (ggml_backend_t b : backends) {
            backend = ggml_backend_get_device(b) == d.dev ? b : backend;
        }
        if (!backend) {
            continue;
        }
        // runs of rows that lie next to each other on both sides; a cropped row ends its run, or stale entries would follow it
        for (size_t i = 0; i < d.rows.size(); ) {
            size_t j = i;
            while (j < d.rows.size() && on_device[d.rows[j]] && d.rows[j] == d.rows[i] + (int) (j - i) && (j == i || !cropped[d.rows[j - 1]])) {
                j++;
            }
            if (j == i) {
                i++;
                continue;
            }
            const int    n_last = cropped[d.rows[j - 1]] ? std::min(n_outputs, n_tokens) : n_tokens;
            const size_t n      = ((j - i - 1)*n_tokens + n_last)*n_used;
            const size_t off    = i*n_tokens*n_used;
            ggml_backend_tensor_get_async(backend, d.ids, ids(d.rows[i]), off*sizeof(int32_t), n*sizeof(int32_t));
            if (weights_too) {
                ggml_backend_tensor_get_async(backend, d.weights, weights(d.rows[i]), off*sizeof(float), n*sizeof(float));
            }
            i = j;
        }
    }
}

const int32_t * moe_router_log::choices(int ubatch, int & n_tokens) const {
    if (ubatch < 0 || ubatch >= (int) segments.size()) {
        return nullptr;
    }
    n_tokens = segments[ubatch].n_tokens;
    return host_ids + segments[ubatch].first;
}

// [n_tokens][n_used] with the log's stride, k of them used
static void call(llama_moe_router_callback callback, void * user_data, int row, int n_tokens, int k, int n_used, const int32_t * ids, const float * weights) {
    if (k == n_used) {
        callback(user_data, row, n_tokens, k, ids, weights);
        return;
    }
    std::vector<int32_t> i((size_t) n_tokens*k);
    std::vector<float>   w((size_t) n_tokens*k);
    for (int t = 0; t < n_tokens; t++) {
        std::copy_n(ids     + (size_t) t*n_used, k, i.begin() + (size_t) t*k);
        std::copy_n(weights + (size_t) t*n_used, k, w.begin() + (size_t) t*k);
    }
    callback(user_data, row, n_tokens, k, i.data(), w.data());
}

// A cropped row's n entries stand at the front: moves each to its token. Entry j is the j-th token with an output, so j <= t.
void moe_router_log::spread_cropped(const segment & s, int row, int n) {
    int32_t * e = host_ids     + s.first + (size_t) row*s.n_tokens*n_used;
    float   * w = host_weights + s.first + (size_t) row*s.n_tokens*n_used;
    for (int t = s.n_tokens - 1, j = n - 1; t >= 0; t--) {
        if (has_output[s.first_output + t] && j >= 0) {
            std::copy_n(e + (size_t) j*n_used, n_used, e + (size_t) t*n_used);
            std::copy_n(w + (size_t) j*n_used, n_used, w + (size_t) t*n_used);
            j--;
        } else {
            std::fill_n(e + (size_t) t*n_used, n_used, -1);
        }
    }
}

void moe_router_log::fold(const std::vector<int> & n_used_of_row, const std::vector<bool> & cropped, llama_moe_router_callback callback, void * user_data) {
    for (; n_folded < segments.size(); n_folded++) {
        const segment & s = segments[n_folded];
        if (!s.complete) {
            continue;
        }
        for (int row = 0; row < n_rows; row++) {
            const int k = n_used_of_row[row];
            const int n = cropped[row] ? std::min(s.n_outputs, s.n_tokens) : s.n_tokens;
            if (k == 0 || n == 0) {
                continue;
            }
            const int32_t * e = host_ids     + s.first + (size_t) row*s.n_tokens*n_used;
            const float   * w = host_weights + s.first + (size_t) row*s.n_tokens*n_used;
            int32_t * c = counts.data() + (size_t) row*n_expert;
            for (int t = 0; t < n; t++) {
                for (int i = 0; i < k; i++) {
                    const int32_t id = e[t*n_used + i];
                    if (id >= 0 && id < n_expert) {
                        c[id]++;
                    }
                }
            }
            if (callback) {
                call(callback, user_data, row, n, k, n_used, e, w);
            }
            if (n < s.n_tokens) {
                spread_cropped(s, row, n);
            }
        }
    }
}

