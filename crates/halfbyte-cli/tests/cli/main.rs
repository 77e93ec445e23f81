//! The built program, as a shell sees it.

mod bench;
mod calibration;
mod files;
mod hostile;
mod models;
mod support;
mod usage;
