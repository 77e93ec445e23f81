//! A server in this process, on the model that ships, asked over TCP.

mod answers;
mod clients;
mod forms;
mod noise;
mod operation;
mod stress;
mod support;
