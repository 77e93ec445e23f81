//! `/v1/models`: what is served.

use crate::app::App;
use crate::error::ApiError;
use crate::served::Served;
use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use std::sync::Arc;

fn model(served: &Served) -> Value {
    json!({
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "halfbyte",
        "context_length": served.context(),
        "chat": served.template.is_some(),
    })
}

/// All models.
pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let models: Vec<Value> = app.models.iter().map(|served| model(served)).collect();
    Json(json!({"object": "list", "data": models}))
}

/// One of them.
pub async fn one(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    Ok(Json(model(&*app.model(Some(&name))?)))
}
