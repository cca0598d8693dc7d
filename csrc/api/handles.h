// What the opaque handles are, and how a function of the C interface turns exceptions into a status.
#pragma once

#include <memory>

#include "base/error.h"
#include "include/deltallama.h"
#include "runtime/session.h"

struct delta_model : delta::SessionPool {
    using SessionPool::SessionPool;
};

struct delta_session {
    delta_model* model;
    std::unique_ptr<delta::Session> session;
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

}  // namespace delta
