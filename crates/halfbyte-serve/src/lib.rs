//! Language models behind the interface that every client speaks: OpenAI's, over HTTP.
//!
//! ```text
//! connection ─ routes ─ api ─ Fields, checked ──▶ Ask ──submit──▶ schedule::Scheduler, in an engine's thread
//!                                                                    │ tokens
//!                              JSON, or server-sent events ◀─ Writing, pieces of text ◀┘
//! ```
//!
//! A text that nobody waits for any more is cancelled, since what holds its handle is dropped: a handler whose connection has closed, or
//! the body of an answer. A client that takes nothing stops its own text first (the scheduler waits for it, and gives its pages to others)
//! and loses its connection after a while.
#![forbid(unsafe_code)]

mod api;
mod app;
pub mod bench;
mod clients;
mod engine;
mod error;
mod fields;
mod grammar;
mod metrics;
mod page;
mod random;
mod record;
mod routes;
mod schema;
mod served;
mod server;
mod settings;
mod tls;
mod tools;
mod unread;
mod writing;

pub use engine::Ended;
pub use error::{Error, Result};
pub use metrics::resident;
pub use served::Served;
pub use server::{Reserved, Server};
pub use settings::{Limits, Settings};
