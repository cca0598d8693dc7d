// What the opaque handles are, and what functions of the C interface do alike: check arguments, turn exceptions into a status, let one
// computation of a model run at a time.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "include/deltallama.h"
#include "runtime/session.h"
#include "runtime/vision.h"

struct delta_model : delta::SessionPool {
    using SessionPool::SessionPool;
};

struct delta_session {
    delta_model* model;
    std::unique_ptr<delta::Session> session;
};

struct delta_vision {
    delta_model* model;
    std::unique_ptr<delta::Vision> vision;
    std::atomic<bool> computing{false};
};

namespace delta {

template <class Body>
delta_status guard(Body&& body) noexcept {
    try {
        body();
        return DELTA_OK;
    } catch (...) {
        return translate_exception();
    }
}

inline void require(const void* pointer, const char* name) {
    if (pointer == nullptr) {
        throw Error(DELTA_ARG, format("%s is null", name));
    }
}

inline void require_size(uint32_t found, size_t expected, const char* name) {
    if (found != expected) {
        throw Error(DELTA_ABI, format("%s.size is %u, this library expects %zu (interface version %d)", name, found, expected,
                                      DELTA_ABI_VERSION));
    }
}

// The one computation of a model, from the check that there is no other until the end of its scope.
class Computing {
   public:
    explicit Computing(delta_model& model, std::vector<Session*> sessions = {}) : model_(*model.model), sessions_(std::move(sessions)) {
        if (model_.busy.exchange(true)) {
            throw Error(DELTA_BUSY, "another computation runs on this model");
        }
        model_.cancel.store(false);  // a wish of before this computation
        for (Session* session : sessions_) {
            session->computing.store(true);
        }
    }
    explicit Computing(delta_session& session) : Computing(*session.model, {session.session.get()}) {}
    ~Computing() {
        for (Session* session : sessions_) {
            session->computing.store(false);
        }
        model_.busy.store(false);
    }
    Computing(const Computing&) = delete;
    Computing& operator=(const Computing&) = delete;

   private:
    Model& model_;
    std::vector<Session*> sessions_;
};

}  // namespace delta
