//! What all requests share.

use crate::clients::{Gate, Keys};
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::served::Served;
use crate::settings::Settings;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A server's models, and what it holds requests to.
#[derive(Debug)]
pub struct App {
    pub(crate) settings: Settings,
    pub(crate) keys: Keys,
    pub(crate) models: Vec<Arc<Served>>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) metrics: Arc<Metrics>,
    ending: AtomicBool,
}

impl App {
    pub(crate) fn new(settings: Settings, models: Vec<Arc<Served>>) -> Arc<Self> {
        Arc::new(Self {
            keys: Keys::new(&settings.keys),
            gate: Gate::new(settings.limits),
            metrics: Arc::new(Metrics::new(&models)),
            // Only digests of them are kept.
            settings: Settings { keys: Vec::new(), ..settings },
            models,
            ending: AtomicBool::new(false),
        })
    }

    /// The model of a name; of one model only, it if there is no name. Error: no such model.
    pub(crate) fn model(&self, name: Option<&str>) -> Result<Arc<Served>, ApiError> {
        match (name, self.models.as_slice()) {
            (None, [only]) => Ok(only.clone()),
            (None, _) => {
                let message = "You must provide a model parameter.";
                Err(ApiError::field("model", "missing_required_parameter", message))
            }
            (Some(name), all) => {
                let known = all.iter().find(|served| served.name == name);
                known.cloned().ok_or_else(|| ApiError::unknown_model(&name.chars().take(200).collect::<String>()))
            }
        }
    }

    /// From now on nothing new is begun.
    pub(crate) fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    /// The model that cannot go on, and why, if there is one.
    pub(crate) fn failed(&self) -> Option<(String, String)> {
        let failed = |served: &Arc<Served>| {
            let ended = served.engine.ended()?;
            Some((served.name.clone(), ended.failure?))
        };
        self.models.iter().find_map(failed)
    }
}
